#include <roundpipe/runtime/row_slices.h>

#include <algorithm>
#include <stdexcept>

#include <ATen/ops/cat.h>

#include <roundpipe/core/error.h>

namespace roundpipe::runtime {
namespace {

bool has_rows(const at::Tensor& tensor, int64_t rows) {
  return tensor.dim() > 0 && tensor.size(0) >= rows && tensor.size(0) % rows == 0;
}

}  // namespace

int64_t rows_of(const Flow& flow) {
  int64_t rows = 0;
  for (size_t i = 0; i < flow.tensors.size(); ++i) {
    if (flow.requires_grad[i] && flow.tensors[i].dim() > 0) rows = std::max(rows, flow.tensors[i].size(0));
  }
  if (rows == 0 && !flow.tensors.empty() && flow.tensors[0].dim() > 0) rows = flow.tensors[0].size(0);
  if (rows < 2) return 0;
  for (size_t i = 0; i < flow.tensors.size(); ++i) {
    if (flow.requires_grad[i] && (flow.tensors[i].dim() == 0 || flow.tensors[i].size(0) != rows)) return 0;
  }
  return rows;
}

at::Tensor slice_rows(const at::Tensor& tensor, int64_t rows, int64_t first, int64_t last) {
  if (!tensor.defined() || !has_rows(tensor, rows)) return tensor;
  const int64_t each = tensor.size(0) / rows;
  return tensor.narrow(0, first * each, (last - first) * each);
}

Flow slice_rows(const Flow& flow, int64_t rows, int64_t first, int64_t last) {
  Flow part;
  part.structure = flow.structure;
  part.requires_grad = flow.requires_grad;
  part.host.resize(flow.host.size());
  for (const at::Tensor& tensor : flow.tensors) part.tensors.push_back(slice_rows(tensor, rows, first, last));
  return part;
}

Flow join_rows(const Flow& inputs, int64_t rows, const std::vector<Flow>& input_parts,
               const std::vector<Flow>& output_parts) {
  Flow joined;
  joined.structure = output_parts.front().structure;
  const size_t outputs = output_parts.front().tensors.size();
  for (size_t i = 0; i < outputs; ++i) {
    std::vector<at::Tensor> parts;
    for (const Flow& part : output_parts) {
      if (part.tensors.size() != outputs) throw std::invalid_argument("[rows] the number of outputs depends on rows");
      parts.push_back(part.tensors[i]);
    }
    size_t same = 0;
    while (same < inputs.tensors.size() && !parts.front().is_same(input_parts.front().tensors[same])) ++same;
    if (same < inputs.tensors.size()) {
      joined.tensors.push_back(inputs.tensors[same]);
      joined.requires_grad.push_back(inputs.requires_grad[same]);
      joined.host.push_back(inputs.host[same]);
      continue;
    }
    int64_t sizes = 0;
    for (const at::Tensor& part : parts) sizes += part.dim() > 0 ? part.size(0) : 0;
    if (parts.front().dim() == 0 || sizes % rows != 0) {
      throw std::invalid_argument(concat("[rows] output ", i, " of size ", parts.front().sizes(), " has no rows"));
    }
    joined.tensors.push_back(at::cat(parts, 0));
    joined.requires_grad.push_back(output_parts.front().requires_grad[i]);
    joined.host.push_back(nullptr);
  }
  return joined;
}

}  // namespace roundpipe::runtime
