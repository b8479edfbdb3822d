#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/device/device.h>

namespace roundpipe::memory {

// One tensor that travels between stages, in its host form: dense, with broadcast dimensions stored once.
// Immutable after its transfer is done; shared by every boundary that passes it on unchanged.
struct HostValue {
  at::Tensor data;                      // host memory; broadcast dimensions have size 1
  std::vector<int64_t> expanded_sizes;  // sizes to expand to; empty when nothing was broadcast
  bool requires_grad = false;
};
using HostValuePtr = std::shared_ptr<HostValue>;

// `tensor` with every broadcast dimension (stride 0, size > 1) cut to size 1; sets `expanded_sizes` if there was one.
at::Tensor without_broadcast(const at::Tensor& tensor, std::vector<int64_t>& expanded_sizes);

// An empty host value to receive `tensor`: same dtype and order of dimensions, dense.
HostValuePtr make_host_value(const at::Tensor& tensor, bool requires_grad, bool pinned);

// The device-side tensor of `value`: allocates on `device` (in the calling scope) and appends the copy to `pieces`.
// The result is valid once the pieces have arrived.
at::Tensor stage_upload(const HostValue& value, c10::Device device, std::vector<device::Piece>& pieces);

// Expands what stage_upload returned to the value's full sizes.
at::Tensor restore_broadcast(const HostValue& value, const at::Tensor& uploaded);

}  // namespace roundpipe::memory
