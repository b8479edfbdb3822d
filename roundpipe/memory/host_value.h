#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/device/device.h>
#include <roundpipe/memory/crossing.h>

namespace roundpipe::memory {

// One tensor that travels between stages, in its host form: settled (see crossing.h), broadcast dimensions stored once.
// It moves as one run of bytes, its span. Immutable after its transfer is done; shared by every boundary that passes it
// on unchanged.
struct HostValue {
  at::Tensor data;                      // host memory; broadcast dimensions have size 1
  std::vector<int64_t> expanded_sizes;  // sizes to expand to; empty when nothing was broadcast
  bool requires_grad = false;
};
using HostValuePtr = std::shared_ptr<HostValue>;

// An empty host value to receive `tensor`; appends the copy to `pieces`. REQUIRES: `tensor` is settled.
HostValuePtr stage_download(const at::Tensor& tensor, bool requires_grad, bool pinned,
                            std::vector<device::Piece>& pieces);

// A copy of a tensor of the user's, from wherever it is; blocks until it is there. Zeros lie in its gaps: only what the
// user has handed in is read.
HostValuePtr copy_to_host(const at::Tensor& tensor, bool requires_grad, bool pinned);

// `tensor`, on the host, without a copy where it is settled and has no gaps; else as copy_to_host.
HostValuePtr refer_to_host(const at::Tensor& tensor, bool requires_grad);

// `tensor`, whose values are to be uploaded into `target`, where devices read host memory best: itself, or a copy in
// page-locked memory that lies as `target` does.
at::Tensor staged_for(const at::Tensor& target, const at::Tensor& tensor, bool pinned);

// The device-side tensor of `value`: allocates on `device` (in the calling scope) and appends the copy to `pieces`.
// The result is valid once the pieces have arrived.
at::Tensor stage_upload(const HostValue& value, c10::Device device, std::vector<device::Piece>& pieces);

// Expands what stage_upload returned to the value's full sizes.
at::Tensor restore_broadcast(const HostValue& value, const at::Tensor& uploaded);

}  // namespace roundpipe::memory
