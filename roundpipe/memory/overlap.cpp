#include <roundpipe/memory/overlap.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include <ATen/MemoryOverlap.h>

#include <roundpipe/core/error.h>

namespace roundpipe::memory {

namespace {

// Where the elements of a parameter lie.
struct Extent {
  const NamedTensor* parameter;
  std::uintptr_t begin, end;
};

Extent extent_of(const NamedTensor& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  return {&parameter, begin, begin + static_cast<std::uintptr_t>((last + 1) * tensor.element_size())};
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_same(b) || !(a.requires_grad() || b.requires_grad())) return false;
  const at::MemOverlapStatus status = at::get_overlap_status(a, b);
  return status == at::MemOverlapStatus::Full || status == at::MemOverlapStatus::Partial;
}

}  // namespace

void refuse_overlap(const std::vector<NamedTensor>& parameters) {
  std::vector<Extent> extents;
  for (const NamedTensor& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    if (tensor.layout() == c10::kStrided && tensor.device().is_cpu() && tensor.numel() > 0)
      extents.push_back(extent_of(parameter));
  }
  std::ranges::sort(extents, {}, &Extent::begin);
  for (size_t i = 0; i < extents.size(); ++i) {
    for (size_t j = i + 1; j < extents.size() && extents[j].begin < extents[i].end; ++j) {
      const NamedTensor &first = *extents[i].parameter, &second = *extents[j].parameter;
      if (!overlap(first.tensor, second.tensor)) continue;
      throw std::invalid_argument(concat("[RoundPipe] parameters '", first.name, "' and '", second.name,
                                         "' lie in the same memory, so that a step of one would change the other, "
                                         "expected memory of their own; assign a clone of the values, or use one "
                                         "parameter in both places"));
    }
  }
}

}  // namespace roundpipe::memory
