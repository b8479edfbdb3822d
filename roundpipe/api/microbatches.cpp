#include <roundpipe/api/microbatches.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <roundpipe/core/error.h>
#include <roundpipe/runtime/call/batch_cut.h>
#include <roundpipe/runtime/call/loss_reduction.h>

namespace roundpipe::detail {

using runtime::BatchLeaf;
using runtime::InputCut;
using runtime::LeafCut;
using runtime::MicrobatchRows;
using runtime::Values;

namespace {

std::string name_of(size_t tensor) { return concat("tensor ", tensor); }

// The tensors of a value as leaves of a batch. `cuts`: those of its first tensors; the others are cut automatically.
std::vector<BatchLeaf> leaves_of(const Values& values, const std::vector<Cut>& cuts, const char* where) {
  if (cuts.size() > values.tensors.size()) {
    throw std::invalid_argument(concat("[", where, "] the options say how ", cuts.size(),
                                       " tensors are cut, and there are ", values.tensors.size(),
                                       ", expected at most one entry for each"));
  }
  std::vector<BatchLeaf> leaves;
  for (size_t i = 0; i < values.tensors.size(); ++i) {
    leaves.push_back({name_of(i), values.tensors[i].sizes().vec(), i < cuts.size() ? cuts[i] : Cut{}});
  }
  return leaves;
}

// The same for labels: whole, or cut by the caller.
std::vector<BatchLeaf> label_leaves(const Batch& labels, const std::vector<Cut>& cuts) {
  std::vector<BatchLeaf> leaves = leaves_of(labels.parts.front(), cuts, "labels");
  if (labels.numbers > 0) {
    BatchLeaf numbers;
    numbers.name = "the label";
    numbers.numbers = labels.numbers;
    leaves.push_back(std::move(numbers));
  }
  if (!labels.is_cut) return leaves;
  for (size_t i = 0; i < leaves.size(); ++i) {
    leaves[i].ready = static_cast<int>(labels.parts.size());
    for (const Values& part : labels.parts) {
      if (i >= part.tensors.size() || part.tensors[i].dim() == 0) break;
      leaves[i].ready_rows.push_back(part.tensors[i].size(0));
    }
    if (leaves[i].ready_rows.size() < labels.parts.size()) leaves[i].ready_rows.clear();
  }
  return leaves;
}

MicrobatchRows rows_of(const Batch& inputs, int count, const std::vector<Cut>& cuts) {
  if (!inputs.is_cut) return InputCut(leaves_of(inputs.parts.front(), cuts, "inputs")).rows(count);
  std::vector<std::vector<BatchLeaf>> parts;
  for (const Values& part : inputs.parts) parts.push_back(leaves_of(part, cuts, "inputs"));
  return runtime::rows_of(parts);
}

std::vector<Values> apply(const Values& values, const std::vector<LeafCut>& cuts, int count) {
  std::vector<Values> parts(static_cast<size_t>(count));
  for (Values& part : parts) part.structure = values.structure;
  for (size_t i = 0; i < values.tensors.size(); ++i) {
    int64_t start = 0;
    for (size_t m = 0; m < parts.size(); ++m) {
      const bool is_whole = cuts[i].dimension < 0;
      parts[m].tensors.push_back(is_whole ? values.tensors[i]
                                          : values.tensors[i].narrow(cuts[i].dimension, start, cuts[i].sizes[m]));
      start += is_whole ? 0 : cuts[i].sizes[m];
    }
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

int count_of(const Batch& inputs, const RunOptions& options, int by_default) {
  const std::optional<int> wanted = options.microbatches == kAutoMicrobatches ? std::nullopt : options.microbatches;
  if (inputs.is_cut) {
    if (inputs.parts.empty()) throw std::invalid_argument("[inputs] there are no microbatches, expected at least one");
    const int count = static_cast<int>(inputs.parts.size());
    if (wanted && *wanted != count) {
      throw std::invalid_argument(concat("[inputs] the batch is cut into ", count,
                                         " microbatches, and the options ask for ", *wanted,
                                         ", expected the same number or none"));
    }
    return count;
  }
  return InputCut(leaves_of(inputs.parts.front(), options.cut_inputs, "inputs")).count(wanted, by_default);
}

std::vector<Values> cut_inputs(const Batch& inputs, int count, const std::vector<Cut>& cuts) {
  if (inputs.is_cut) return as_given(inputs, count, "inputs");
  const InputCut cut(leaves_of(inputs.parts.front(), cuts, "inputs"));
  const std::vector<LeafCut> found = cut.cut(count);
  if (const std::string doubts = cut.doubts(); count > 1 && !doubts.empty()) TORCH_WARN(doubts);
  return apply(inputs.parts.front(), found, count);
}

std::vector<Values> cut_labels(const Batch& labels, const Batch& inputs, int count, const RunOptions& options) {
  const MicrobatchRows rows = rows_of(inputs, count, options.cut_inputs);
  if (!labels.is_cut) {
    return apply(labels.parts.front(), runtime::cut_labels(label_leaves(labels, options.cut_labels), rows, count),
                 count);
  }
  std::vector<Values> given = as_given(labels, count, "labels");
  runtime::cut_labels(label_leaves(labels, options.cut_labels), rows, count);
  return given;
}

std::vector<runtime::LossRows> loss_rows(const std::vector<Values>& inputs, const std::vector<Cut>& input_cuts,
                                         const std::vector<Values>& labels, const std::vector<Cut>& label_cuts) {
  std::vector<runtime::LossRows> microbatches(inputs.size());
  for (size_t m = 0; m < inputs.size(); ++m) {
    runtime::LossRows& own = microbatches[m];
    const std::vector<BatchLeaf> leaves = leaves_of(inputs[m], input_cuts, "inputs");
    for (const BatchLeaf& leaf : leaves) {
      if (const int64_t dimension = given_dimension(leaf, "inputs"); dimension >= 0) {
        own.dimension = dimension;
        break;
      }
    }
    const std::vector<BatchLeaf> of_label = leaves_of(labels[m], label_cuts, "labels");
    const bool has_label_rows = !of_label.empty() && !of_label.front().shape.empty();
    const MicrobatchRows rows = InputCut(leaves).rows(1);
    own.rows = std::max<int64_t>(1, rows ? rows->front() : has_label_rows ? of_label.front().shape[0] : 1);
    for (const BatchLeaf& leaf : of_label) {
      const bool is_row_by_row =
          leaf.cut.kind == Cut::Kind::kAutomatic && !leaf.shape.empty() && leaf.shape[0] == own.rows;
      own.label_dimensions.push_back(is_row_by_row ? 0 : given_dimension(leaf, "labels"));
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
    } else if (first.scalar_type() == at::kBool) {
      for (const at::Tensor& part : parts) {
        if (at::equal(part, first)) continue;
        throw std::invalid_argument(concat("[outputs] tensor ", i,
                                           " is true in some microbatches and false in others, expected the same in "
                                           "all; use Model::forward_microbatches"));
      }
      whole.tensors[i] = first;
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
