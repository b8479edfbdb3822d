#include <roundpipe/runtime/call/loss_reduction.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <roundpipe/core/error.h>
#include <roundpipe/runtime/model/out_of_memory.h>
#include <roundpipe/torch_compat/autograd_nodes.h>
#include <roundpipe/torch_compat/own_generators.h>

namespace roundpipe::runtime {

namespace {

constexpr int64_t kWhole = -1;  // a tensor that is the same for all rows

// Along which dimension the rows of an output lie.
int64_t dimension_of_rows(const at::Tensor& tensor, const LossRows& microbatch) {
  const int64_t rows = microbatch.rows;
  const auto sizes = tensor.sizes();
  for (const int64_t dimension : {microbatch.dimension, int64_t{0}}) {
    if (dimension < tensor.dim() && sizes[static_cast<size_t>(dimension)] == rows) return dimension;
  }
  const auto found = std::ranges::find(sizes, rows);
  const bool only = found != sizes.end() && std::ranges::count(sizes, rows) == 1;
  return only ? found - sizes.begin() : kWhole;
}

std::vector<int64_t> dimensions_of_rows(const Values& values, const LossRows& microbatch) {
  std::vector<int64_t> dimensions;
  for (const at::Tensor& tensor : values.tensors) dimensions.push_back(dimension_of_rows(tensor, microbatch));
  return dimensions;
}

// A copy of rows [first, end) of a tensor, which has one more row than there is if it has a single one.
at::Tensor copy_of_rows(const at::Tensor& tensor, int64_t dimension, int64_t first, int64_t end) {
  const at::NoGradGuard no_grad;
  const at::Tensor plain = tensor.detach();
  if (dimension == kWhole) return plain.clone();
  return end > plain.size(dimension) ? at::cat({plain, plain}, dimension)
                                     : plain.narrow(dimension, first, end - first).clone();
}

int64_t sum_of(const std::vector<int64_t>& numbers, int64_t first, int64_t end) {
  return std::accumulate(numbers.begin() + first, numbers.begin() + end, int64_t{0});
}

// Where to part the rows: in halves, unless the parts' labels count as the rows do there, and do not elsewhere.
int64_t place_to_part(const LossRows& microbatch) {
  const int64_t rows = microbatch.rows, half = rows / 2;
  if (microbatch.counted.empty()) return half;
  const int64_t all = sum_of(microbatch.counted, 0, rows);
  int64_t best = half;
  for (int64_t distance = 0; distance < rows; ++distance) {
    for (const int64_t place : {half - distance, half + distance}) {
      if (place < 1 || place >= rows) continue;
      const int64_t counted = sum_of(microbatch.counted, 0, place);
      if (counted == 0 || counted == all) continue;
      if (counted * rows != place * all) return place;
    }
  }
  return best;
}

// How close a prediction has to be, as a part of what is predicted.
double tolerance_of(const at::Tensor& loss) {
  return loss.scalar_type() == at::kHalf || loss.scalar_type() == at::kBFloat16 ? 0.05 : 1e-3;
}

// The message of an error, without a backtrace.
std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& failure) {
    return failure.what_without_backtrace();
  } catch (const std::exception& failure) {
    return failure.what();
  } catch (...) {
    return "unknown";
  }
}

double squared(const at::Tensor& tensor) { return tensor.to(at::kDouble).abs().square().sum().item<double>(); }

}  // namespace

std::string nan_loss(const std::string& which) {
  return concat("[forward_backward] the loss", which,
                " is NaN; the batch's gradients are dropped; check the data, lower the learning rate, make the model "
                "with check_loss off, or set ROUNDPIPE_CHECK_LOSS=0");
}

void count_labels(std::vector<LossRows>& microbatches, const std::vector<Values>& labels) {
  const at::NoGradGuard no_grad;
  const auto counts = [&](size_t m, size_t i) {
    const auto& dimensions = microbatches[m].label_dimensions;
    if (i >= dimensions.size() || dimensions[i] == kWhole) return at::Tensor();
    const at::Tensor& label = labels[m].tensors[i];
    if (!c10::isIntegralType(label.scalar_type(), /*includeBool=*/false) || label.numel() == 0) return at::Tensor();
    return label.ge(0);
  };
  for (size_t i = 0; i < labels.front().tensors.size(); ++i) {
    std::vector<at::Tensor> masks;
    bool any = false;
    for (size_t m = 0; m < microbatches.size(); ++m) {
      masks.push_back(counts(m, i));
      any |= masks.back().defined() && !masks.back().all().item<bool>();
    }
    if (!any || !std::ranges::all_of(masks, [](const at::Tensor& mask) { return mask.defined(); })) continue;
    for (size_t m = 0; m < microbatches.size(); ++m) {
      const at::Tensor by_row = masks[m].movedim(microbatches[m].label_dimensions[i], 0);
      const at::Tensor sums = by_row.reshape({by_row.size(0), -1}).sum(1).contiguous();
      const auto* const first = sums.const_data_ptr<int64_t>();
      microbatches[m].counted.assign(first, first + sums.numel());
    }
    return;
  }
}

// The losses of some rows, and what they were computed from.
struct TriedLoss::Part {
  std::vector<at::Tensor> losses;
  std::vector<at::Tensor> leaves;
  std::vector<int64_t> dimensions;  // of the rows of each leaf

  double value(size_t loss) const { return losses[loss].item<double>(); }

  // Of a loss by each leaf that has rows.
  std::vector<at::Tensor> gradients(size_t loss) const {
    std::vector<at::Tensor> wanted;
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (leaves[i].requires_grad() && dimensions[i] != kWhole) wanted.push_back(leaves[i]);
    }
    if (wanted.empty() || !losses[loss].requires_grad()) return {};
    std::vector<at::Tensor> found = torch::autograd::grad({losses[loss]}, wanted, {}, /*retain_graph=*/true,
                                                          /*create_graph=*/false, /*allow_unused=*/true);
    for (size_t i = 0; i < found.size(); ++i) {
      if (!found[i].defined()) found[i] = at::zeros_like(wanted[i]);
    }
    return found;
  }
  std::vector<int64_t> dimensions_of_gradients() const {
    std::vector<int64_t> found;
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (leaves[i].requires_grad() && dimensions[i] != kWhole) found.push_back(dimensions[i]);
    }
    return found;
  }
};

// What one microbatch tells: the loss of a whole beside those of its two parts. The whole is the microbatch or, if it
// has one row, that row twice.
struct TriedLoss::Trial {
  // A kind of loss, in which a whole has so much of each part.
  struct Candidate {
    Kind kind;
    double first, second;
    double of(double a, double b) const { return first * a + second * b; }
  };
  std::vector<Candidate> candidates;  // the likelier first
  int64_t rows = 0, first_rows = 0;
  // Of each loss.
  struct Loss {
    double whole = 0, first = 0, second = 0;
    bool told = false;         // by gradients
    std::optional<Kind> kind;  // none: the gradients are zero, too
  };
  std::vector<Loss> losses;
  bool drew = false;    // random numbers, so that predictions are coarse
  std::string failure;  // why nothing could be tried; empty: it could

  // The first kind whose predictions are at most so far off.
  template <typename Distance>
  Kind nearest(const Distance& distance, double tolerance, double size) const {
    for (const Candidate& candidate : candidates) {
      if (distance(candidate) <= (drew ? 0.15 : tolerance) * size) return candidate.kind;
    }
    return Kind::kOther;
  }
  std::optional<Kind> by_gradients(const Part& whole, const Part& first, const Part& second, size_t loss) const;
};

std::optional<TriedLoss::Kind> TriedLoss::Trial::by_gradients(const Part& whole, const Part& first, const Part& second,
                                                              size_t loss) const {
  const std::vector<at::Tensor> of_whole = whole.gradients(loss);
  const std::vector<at::Tensor> of_first = first.gradients(loss), of_second = second.gradients(loss);
  const std::vector<int64_t> dimensions = whole.dimensions_of_gradients();
  if (of_whole.size() != of_first.size() || of_whole.size() != of_second.size()) return Kind::kOther;
  double size = 0;
  std::vector<at::Tensor> upper, lower;  // the parts of the whole's
  for (size_t i = 0; i < of_whole.size(); ++i) {
    const int64_t place = of_first[i].size(dimensions[i]);
    upper.push_back(of_whole[i].narrow(dimensions[i], 0, place));
    lower.push_back(of_whole[i].narrow(dimensions[i], place, of_second[i].size(dimensions[i])));
    size += squared(of_whole[i]) + squared(of_first[i]) + squared(of_second[i]);
  }
  if (size == 0 || !std::isfinite(size)) return std::nullopt;
  const auto distance = [&](const Candidate& candidate) {
    double squares = 0;
    for (size_t i = 0; i < of_whole.size(); ++i) {
      squares +=
          squared(upper[i] - candidate.first * of_first[i]) + squared(lower[i] - candidate.second * of_second[i]);
    }
    return std::sqrt(squares);
  };
  return nearest(distance, tolerance_of(whole.losses[loss]), std::sqrt(size));
}

TriedLoss::TriedLoss(Function function, std::vector<LossRows> microbatches, std::optional<LossReduction> given)
    : function_(std::move(function)),
      microbatches_(std::move(microbatches)),
      given_(given),
      open_(!given && microbatches_.size() > 1) {
  for (const LossRows& microbatch : microbatches_) {
    rows_ += microbatch.rows;
    counted_ += sum_of(microbatch.counted, 0, static_cast<int64_t>(microbatch.counted.size()));
  }
}

bool TriedLoss::is_open() const {
  const MutexLock lock(mutex_);
  return open_;
}

std::string TriedLoss::notice() const {
  const MutexLock lock(mutex_);
  return notice_;
}

TriedLoss::Part TriedLoss::evaluate(const Values& outputs, const Values& label, const LossRows& rows, int64_t first,
                                    int64_t end) const {
  Part part;
  part.dimensions = dimensions_of_rows(outputs, rows);
  Values some_labels{{}, label.structure};
  for (size_t i = 0; i < outputs.tensors.size(); ++i) {
    part.leaves.push_back(copy_of_rows(outputs.tensors[i], part.dimensions[i], first, end));
    part.leaves.back().set_requires_grad(outputs.tensors[i].requires_grad());
  }
  for (size_t i = 0; i < label.tensors.size(); ++i)
    some_labels.tensors.push_back(copy_of_rows(label.tensors[i], rows.label_dimensions.at(i), first, end));
  // The loss may write to its arguments, which autograd forbids for leaves.
  part.losses = function_({torch_compat::cross_boundary(part.leaves), outputs.structure}, some_labels);
  return part;
}

TriedLoss::Trial TriedLoss::try_parts(const Values& outputs, const Values& label, const LayerContext& context) const {
  const LossRows& rows = microbatches_[static_cast<size_t>(context.microbatch)];
  const bool single = rows.rows == 1;
  const int64_t place = single ? 1 : place_to_part(rows), end = single ? 2 : rows.rows;
  Trial trial;
  trial.rows = rows.rows;
  trial.first_rows = place;
  const double share = static_cast<double>(place) / static_cast<double>(end);
  double share_of_labels = share;
  if (!rows.counted.empty() && !single) {
    const auto counted = static_cast<double>(sum_of(rows.counted, 0, rows.rows));
    if (counted > 0) share_of_labels = static_cast<double>(sum_of(rows.counted, 0, place)) / counted;
  }
  if (counted_ > 0) trial.candidates.push_back({Kind::kMeanOfLabels, share_of_labels, 1 - share_of_labels});
  trial.candidates.push_back({Kind::kMeanOfRows, share, 1 - share});
  trial.candidates.push_back({Kind::kSum, 1, 1});

  const std::vector<int64_t> dimensions = dimensions_of_rows(outputs, rows);
  if (std::ranges::count(dimensions, kWhole) == std::ssize(dimensions)) {
    trial.failure = concat("none of its outputs has the ", rows.rows, " rows of a microbatch");
    return trial;
  }
  // Of its own, so that what the loss draws afterwards does not depend on whether it was tried.
  const auto generators = std::make_shared<torch_compat::OwnGenerators>();
  const torch_compat::OwnGenerators::Scope own(generators);
  const auto of_rows = [&](int64_t from, int64_t to) {
    generators->seed(context.seed.value_or(0));
    return evaluate(outputs, label, rows, from, to);
  };
  std::optional<Part> whole, first, second;
  if (single) {
    whole = of_rows(0, 2);
  } else {
    first = of_rows(0, place);
    second = of_rows(place, rows.rows);
    if (first->losses.size() != second->losses.size()) throw std::invalid_argument("its parts have other losses");
  }
  for (size_t i = 0; i < (single ? whole : first)->losses.size(); ++i) {
    Trial::Loss& loss = trial.losses.emplace_back();
    if (single) {
      loss.whole = whole->value(i);
    } else {
      loss.first = first->value(i);
      loss.second = second->value(i);
      // A mean over no label is NaN, and has no share.
      if (share_of_labels == 0 && std::isnan(loss.first)) loss.first = 0;
      if (share_of_labels == 1 && std::isnan(loss.second)) loss.second = 0;
    }
    // Losses that are zero or cancel out do not tell; their gradients do.
    const double sum = single ? loss.whole : loss.first + loss.second;
    const double mean = single ? loss.whole / 2 : trial.candidates[counted_ > 0 ? 1 : 0].of(loss.first, loss.second);
    const double size = single ? std::abs(loss.whole) : std::abs(loss.first) + std::abs(loss.second);
    if (!std::isfinite(size) || (size > 0 && std::abs(sum - mean) > 0.1 * size)) continue;
    if (single && !first) first = second = of_rows(0, 1);
    if (!whole) whole = of_rows(0, rows.rows);
    trial.drew = generators->any();
    loss.told = true;
    loss.kind = trial.by_gradients(*whole, *first, *second, i);
  }
  trial.drew = generators->any();
  return trial;
}

void TriedLoss::conclude(const Trial& trial, const std::vector<at::Tensor>& losses) {
  const MutexLock lock(mutex_);
  if (!open_) return;
  kinds_.resize(losses.size());
  std::string why = trial.failure;
  for (size_t i = 0; i < losses.size(); ++i) {
    if (kinds_[i]) continue;
    if (!why.empty() || trial.losses.size() != losses.size()) {
      kinds_[i] = Kind::kOther;
      continue;
    }
    const double own = losses[i].item<double>();
    if (!std::isfinite(own)) continue;
    Trial::Loss loss = trial.losses[i];
    if (loss.told) {
      kinds_[i] = loss.kind;
      continue;
    }
    if (trial.rows == 1) {
      loss.first = loss.second = own;
    } else {
      loss.whole = own;
    }
    const auto distance = [&](const Trial::Candidate& candidate) {
      return std::abs(loss.whole - candidate.of(loss.first, loss.second));
    };
    const double size = std::abs(loss.first) + std::abs(loss.second);
    kinds_[i] = std::isfinite(size) ? trial.nearest(distance, tolerance_of(losses[i]), size) : Kind::kOther;
    if (kinds_[i] != Kind::kOther || !notice_.empty()) continue;
    why = trial.rows == 1 ? concat("on a microbatch of one row it is ", own, ", and on that row twice ", loss.whole)
                          : concat("on ", trial.rows, " rows it is ", own, ", on the first ", trial.first_rows,
                                   " of them ", loss.first, " and on the others ", loss.second);
  }
  open_ = !std::ranges::all_of(kinds_, [](const std::optional<Kind>& kind) { return kind.has_value(); });
  if (std::ranges::find(kinds_, std::optional(Kind::kOther)) == kinds_.end()) return;
  notice_ = concat("[forward_backward] the loss is neither a sum nor a mean over the rows of a microbatch",
                   why.empty() ? "" : ": ", why, "; the losses of ", microbatches_.size(),
                   " microbatches are added as they are, so gradients depend on their number; divide the loss by a "
                   "count of the whole batch, or say in RunOptions::loss_reduction what it is");
}

at::Tensor TriedLoss::weighted(const at::Tensor& loss, std::optional<Kind> kind, const LossRows& microbatch) const {
  const auto rows = static_cast<int64_t>(microbatch.counted.size());
  const int64_t counted = sum_of(microbatch.counted, 0, rows);
  // A mean over no label is NaN. In the whole batch, such rows have no part.
  if (counted_ > 0 && counted == 0 && kind != Kind::kSum && loss.isnan().item<bool>())
    return at::nan_to_num(loss, 0.0) * 0;
  if (kind == Kind::kMeanOfRows) return loss * (static_cast<double>(microbatch.rows) / static_cast<double>(rows_));
  if (kind == Kind::kMeanOfLabels) return loss * (static_cast<double>(counted) / static_cast<double>(counted_));
  return loss;
}

std::vector<at::Tensor> TriedLoss::operator()(const Values& outputs, const Values& label, const LayerContext& context) {
  std::optional<Trial> trial;
  if (is_open()) {
    try {
      trial = try_parts(outputs, label, context);
    } catch (...) {
      if (is_out_of_memory(std::current_exception())) throw;
      trial.emplace();
      trial->failure = concat("on a part of a microbatch's rows, it failed: ", message_of(std::current_exception()));
    }
    if (context.seed) torch_compat::OwnGenerators::current()->seed(*context.seed);
  }
  std::vector<at::Tensor> losses = function_(outputs, label);
  if (microbatches_.size() == 1) return losses;
  if (trial) conclude(*trial, losses);
  const std::vector<std::optional<Kind>> kinds = kinds_of(losses.size());
  for (size_t i = 0; i < losses.size(); ++i)
    losses[i] = weighted(losses[i], kinds[i], microbatches_[static_cast<size_t>(context.microbatch)]);
  return losses;
}

std::vector<std::optional<TriedLoss::Kind>> TriedLoss::kinds_of(size_t losses) const {
  const Kind mean = counted_ > 0 ? Kind::kMeanOfLabels : Kind::kMeanOfRows;
  if (given_) return std::vector<std::optional<Kind>>(losses, *given_ == LossReduction::kMean ? mean : Kind::kSum);
  const MutexLock lock(mutex_);
  std::vector<std::optional<Kind>> kinds = kinds_;
  kinds.resize(losses);
  return kinds;
}

}  // namespace roundpipe::runtime
