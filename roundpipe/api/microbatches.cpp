#include <roundpipe/api/microbatches.h>

#include <algorithm>
#include <map>
#include <numeric>

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor_split.h>
#include <c10/util/Exception.h>

#include <roundpipe/core/error.h>

namespace roundpipe::detail {

using runtime::Values;

namespace {

// The dimension along which each tensor is cut; -1: every part gets it whole.
using Dimensions = std::vector<int64_t>;

Cut cut_of(const std::vector<Cut>& cuts, size_t i) { return i < cuts.size() ? cuts[i] : Cut{}; }

// The dimensions of tensors that are cut as the caller says; automatic ones are -1 still.
Dimensions given_dimensions(const Values& values, const std::vector<Cut>& cuts, const char* where) {
  if (cuts.size() > values.tensors.size()) {
    throw std::invalid_argument(concat("[", where, "] the options say how ", cuts.size(),
                                       " tensors are cut, and there are ", values.tensors.size(),
                                       ", expected at most one entry for each"));
  }
  Dimensions dimensions(values.tensors.size(), -1);
  for (size_t i = 0; i < values.tensors.size(); ++i) {
    const Cut cut = cut_of(cuts, i);
    if (cut.kind != Cut::Kind::kAlong) continue;
    const int64_t rank = values.tensors[i].dim();
    if (cut.dimension < -rank || cut.dimension >= rank) {
      throw std::invalid_argument(concat("[", where, "] tensor ", i, " has shape ", values.tensors[i].sizes(),
                                         ", expected a dimension ", cut.dimension, " to cut along; use Cut::whole()"));
    }
    dimensions[i] = cut.dimension < 0 ? cut.dimension + rank : cut.dimension;
  }
  return dimensions;
}

bool is_automatic(const Values& values, const std::vector<Cut>& cuts, size_t i) {
  return cut_of(cuts, i).kind == Cut::Kind::kAutomatic && values.tensors[i].dim() > 0;
}

// The rows of the batch; -1: nothing tells.
int64_t batch_rows(const Values& values, const std::vector<Cut>& cuts, const Dimensions& given) {
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i] >= 0) return values.tensors[i].size(given[i]);
  }
  std::map<int64_t, int> counts;
  int64_t rows = -1;
  for (size_t i = 0; i < given.size(); ++i) {
    if (is_automatic(values, cuts, i)) ++counts[values.tensors[i].size(0)];
  }
  // The first of the most frequent ones.
  for (size_t i = 0; i < given.size(); ++i) {
    if (!is_automatic(values, cuts, i)) continue;
    const int64_t own = values.tensors[i].size(0);
    if (rows < 0 || counts[own] > counts[rows]) rows = own;
  }
  return rows;
}

Dimensions input_dimensions(const Values& values, const std::vector<Cut>& cuts, std::vector<size_t>* doubtful) {
  Dimensions dimensions = given_dimensions(values, cuts, "inputs");
  const int64_t rows = batch_rows(values, cuts, dimensions);
  for (size_t i = 0; i < dimensions.size(); ++i) {
    if (!is_automatic(values, cuts, i)) continue;
    const int64_t own = values.tensors[i].size(0);
    if (own == rows) {
      dimensions[i] = 0;
    } else if (own != 1 && doubtful != nullptr) {
      doubtful->push_back(i);
    }
  }
  return dimensions;
}

Dimensions label_dimensions(const Values& values, const std::vector<Cut>& cuts) {
  Dimensions dimensions = given_dimensions(values, cuts, "labels");
  int64_t most = 0;
  for (size_t i = 0; i < dimensions.size(); ++i) {
    if (is_automatic(values, cuts, i)) most = std::max(most, values.tensors[i].size(0));
  }
  int64_t rows = -1;
  for (size_t i = 0; i < dimensions.size(); ++i) {
    if (!is_automatic(values, cuts, i)) continue;
    const int64_t own = values.tensors[i].size(0);
    if (own == 1 && most > 1) continue;  // a single row beside a batch stands for all rows
    if (rows >= 0 && own != rows) {
      throw std::invalid_argument(concat("[labels] tensor ", i, " has ", own, " rows (shape ",
                                         values.tensors[i].sizes(), ") and another has ", rows,
                                         ", expected the same batch size; give RunOptions::cut_labels for them"));
    }
    rows = own;
    dimensions[i] = 0;
  }
  return dimensions;
}

void check_rows(const Values& values, const Dimensions& dimensions, int count, const char* where) {
  for (size_t i = 0; i < dimensions.size(); ++i) {
    if (dimensions[i] < 0 || values.tensors[i].size(dimensions[i]) >= count) continue;
    throw std::invalid_argument(
        concat("[", where, "] tensor ", i, " has ", values.tensors[i].size(dimensions[i]), " rows, fewer than the ",
               count, " microbatches, expected at least one row for each; ask for fewer microbatches"));
  }
}

// Labels without a cut of their own belong to the rows of the inputs, one by one.
void check_labels_of_rows(const Values& labels, const Dimensions& dimensions, const Batch& inputs, int count,
                          const RunOptions& options) {
  for (size_t i = 0; i < dimensions.size(); ++i) {
    if (dimensions[i] < 0 || !is_automatic(labels, options.cut_labels, i)) continue;
    const int64_t own = labels.tensors[i].size(dimensions[i]);
    if (!inputs.is_cut) {
      const Values& values = inputs.parts.front();
      const Dimensions given = given_dimensions(values, options.cut_inputs, "inputs");
      const int64_t rows = batch_rows(values, options.cut_inputs, given);
      if (rows < 0 || rows == own) continue;
      throw std::invalid_argument(concat("[labels] tensor ", i, " has ", own, " rows (shape ",
                                         labels.tensors[i].sizes(), ") and the batch has ", rows,
                                         ", expected a label for each row; if labels are no rows, say how they are cut "
                                         "in RunOptions::cut_labels, or pass Microbatches"));
    }
    std::vector<int64_t> rows;
    for (const Values& part : inputs.parts) rows.push_back(batch_rows(part, {}, Dimensions(part.tensors.size(), -1)));
    if (std::accumulate(rows.begin(), rows.end(), int64_t{0}) != own) continue;
    for (int m = 0; m < count; ++m) {
      const int64_t cut = own / count + (m < own % count ? 1 : 0);
      if (rows[static_cast<size_t>(m)] == cut) continue;
      throw std::invalid_argument(concat("[labels] microbatch ", m, " of the inputs has ", rows[static_cast<size_t>(m)],
                                         " rows and would get ", cut,
                                         " of the labels, expected as many; cut the labels "
                                         "as the inputs are and pass them as Microbatches"));
    }
  }
}

// REQUIRES: check_rows.
std::vector<Values> cut(const Values& values, const Dimensions& dimensions, int count) {
  if (count == 1) return {values};
  std::vector<Values> parts(static_cast<size_t>(count));
  for (Values& part : parts) part.structure = values.structure;
  for (size_t i = 0; i < dimensions.size(); ++i) {
    const std::vector<at::Tensor> pieces = dimensions[i] < 0
                                               ? std::vector<at::Tensor>(parts.size(), values.tensors[i])
                                               : at::tensor_split(values.tensors[i], count, dimensions[i]);
    for (size_t m = 0; m < parts.size(); ++m) parts[m].tensors.push_back(pieces[m]);
  }
  return parts;
}

std::vector<Values> as_given(const Batch& batch, int count, const char* where) {
  if (static_cast<int>(batch.parts.size()) == count) return batch.parts;
  throw std::invalid_argument(concat("[", where, "] the batch is cut into ", batch.parts.size(),
                                     " microbatches, expected ", count, ", as the inputs are"));
}

}  // namespace

Batch on_host(Batch batch, const char* where) {
  for (Values& values : batch.parts) {
    for (at::Tensor& tensor : values.tensors) {
      if (tensor.is_meta() || tensor.layout() != c10::kStrided || tensor.is_nested() || tensor.is_quantized()) {
        throw std::invalid_argument(concat("[", where, "] a tensor of shape ", tensor.sizes(), " is ", tensor.layout(),
                                           " on ", tensor.device(),
                                           ", expected a dense strided tensor with data; convert it inside a layer"));
      }
      if (!tensor.is_cpu()) tensor = tensor.cpu();
    }
  }
  return batch;
}

int count_of(const Batch& inputs, const RunOptions& options, int devices) {
  if (inputs.is_cut) {
    if (inputs.parts.empty()) throw std::invalid_argument("[inputs] there are no microbatches, expected at least one");
    const int count = static_cast<int>(inputs.parts.size());
    if (options.microbatches && *options.microbatches != count) {
      throw std::invalid_argument(concat("[inputs] the batch is cut into ", count,
                                         " microbatches, and the options ask for ", *options.microbatches,
                                         ", expected the same number or none"));
    }
    return count;
  }
  const Values& values = inputs.parts.front();
  const Dimensions dimensions = input_dimensions(values, options.cut_inputs, nullptr);
  int64_t rows = -1;
  for (size_t i = 0; i < dimensions.size(); ++i) {
    if (dimensions[i] < 0) continue;
    const int64_t own = values.tensors[i].size(dimensions[i]);
    rows = rows < 0 ? own : std::min(rows, own);
  }
  if (rows == 0) throw std::invalid_argument("[inputs] the batch is empty, expected at least one row");
  if (rows < 0) return options.microbatches.value_or(1);
  return static_cast<int>(std::min<int64_t>(rows, options.microbatches.value_or(default_microbatches(devices))));
}

std::vector<Values> cut_inputs(const Batch& inputs, int count, const std::vector<Cut>& cuts) {
  if (inputs.is_cut) return as_given(inputs, count, "inputs");
  std::vector<size_t> doubtful;
  const Dimensions dimensions = input_dimensions(inputs.parts.front(), cuts, &doubtful);
  if (count > 1) {
    check_rows(inputs.parts.front(), dimensions, count, "inputs");
    for (const size_t i : doubtful) {
      TORCH_WARN("[inputs] tensor ", i, " of shape ", inputs.parts.front().tensors[i].sizes(),
                 " does not have the rows of the batch, so every microbatch gets it whole; say so with Cut::whole() in "
                 "RunOptions::cut_inputs, or say how it is cut");
    }
  }
  return cut(inputs.parts.front(), dimensions, count);
}

std::vector<Values> cut_labels(const Batch& labels, const Batch& inputs, int count, const RunOptions& options) {
  if (labels.is_cut) return as_given(labels, count, "labels");
  const Values& values = labels.parts.front();
  const Dimensions dimensions = label_dimensions(values, options.cut_labels);
  if (count > 1) {
    check_rows(values, dimensions, count, "labels");
    check_labels_of_rows(values, dimensions, inputs, count, options);
  }
  return cut(values, dimensions, count);
}

std::vector<runtime::LossRows> loss_rows(const std::vector<Values>& inputs, const std::vector<Cut>& input_cuts,
                                         const std::vector<Values>& labels, const std::vector<Cut>& label_cuts) {
  std::vector<runtime::LossRows> microbatches(inputs.size());
  for (size_t m = 0; m < inputs.size(); ++m) {
    const Values& label = labels[m];
    const Dimensions given = given_dimensions(inputs[m], input_cuts, "inputs");
    int64_t rows = batch_rows(inputs[m], input_cuts, given);
    const auto along = std::ranges::find_if(given, [](int64_t dimension) { return dimension >= 0; });
    if (along != given.end()) microbatches[m].dimension = *along;
    if (rows < 0 && !label.tensors.empty() && label.tensors.front().dim() > 0) rows = label.tensors.front().size(0);
    microbatches[m].rows = std::max<int64_t>(rows, 1);
    microbatches[m].label_dimensions = given_dimensions(label, label_cuts, "labels");
    for (size_t i = 0; i < label.tensors.size(); ++i) {
      if (is_automatic(label, label_cuts, i) && label.tensors[i].size(0) == microbatches[m].rows)
        microbatches[m].label_dimensions[i] = 0;
    }
  }
  if (microbatches.size() > 1) runtime::count_labels(microbatches, labels);
  return microbatches;
}

Values merged(const std::vector<Values>& outputs, c10::Device device) {
  Values whole = outputs.front();
  const std::type_info& type = Structure::of(whole).type();
  for (const Values& part : outputs) {
    if (Structure::of(part).type() == type && part.tensors.size() == whole.tensors.size()) continue;
    throw std::invalid_argument(
        "[outputs] the microbatches returned different types or numbers of tensors, so they have no whole; use "
        "Model::forward_microbatches");
  }
  for (size_t i = 0; i < whole.tensors.size(); ++i) {
    std::vector<at::Tensor> parts;
    for (const Values& part : outputs) parts.push_back(part.tensors[i].to(device));
    const at::Tensor& first = parts.front();
    if (parts.size() == 1) {
      whole.tensors[i] = first;
    } else if (first.dim() > 0) {
      try {
        whole.tensors[i] = at::cat(parts);
      } catch (const c10::Error& error) {
        throw std::invalid_argument(concat("[outputs] tensor ", i, " of the microbatches cannot be concatenated: ",
                                           error.what_without_backtrace(), "; use Model::forward_microbatches"));
      }
    } else {
      const at::Tensor stacked = at::stack(parts);
      whole.tensors[i] = stacked.is_floating_point() || stacked.is_complex()
                             ? stacked.mean(0)
                             : stacked.sum(0) / static_cast<int64_t>(parts.size());
    }
  }
  return whole;
}

}  // namespace roundpipe::detail
