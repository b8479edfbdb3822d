#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/device/device.h>
#include <roundpipe/memory/crossing.h>

namespace roundpipe::memory {

// The host copy of one tensor that travels between stages: settled (see crossing.h), broadcast dimensions stored once.
// It moves as one run of bytes, its span. Immutable after its transfer is done. All boundaries that pass it on
// unchanged share it.
struct HostValue {
  at::Tensor data;                      // host memory; broadcast dimensions have size 1
  std::vector<int64_t> expanded_sizes;  // sizes to expand to; empty if nothing was broadcast
  bool requires_grad = false;
};
using HostValuePtr = std::shared_ptr<HostValue>;

// Makes an empty host value to receive `tensor` and appends the copy to `pieces`. REQUIRES: `tensor` is settled.
HostValuePtr stage_download(const at::Tensor& tensor, bool requires_grad, bool pinned,
                            std::vector<device::Piece>& pieces);

// Copies a user's tensor from any device and blocks until the copy is done. Gaps are filled with zeros: memory between
// the user's values is never read.
HostValuePtr copy_to_host(const at::Tensor& tensor, bool requires_grad, bool pinned);

// Makes a host value of `tensor`, which is on the host. Shares its memory if it is settled and has no gaps, else copies
// like copy_to_host, into pageable memory.
HostValuePtr refer_to_host(const at::Tensor& tensor, bool requires_grad);

// Returns `tensor` in host memory that is best for an upload into `target`: itself or, if `pinned`, a page-locked copy
// with the layout of `target`.
at::Tensor staged_for(const at::Tensor& target, const at::Tensor& tensor, bool pinned);

// Allocates the tensor of `value` on `device` (in the calling scope) and appends the copy to `pieces`. The result is
// valid when the pieces have arrived.
at::Tensor stage_upload(const HostValue& value, c10::Device device, std::vector<device::Piece>& pieces);

// Expands a result of stage_upload to the value's full sizes.
at::Tensor restore_broadcast(const HostValue& value, const at::Tensor& uploaded);

}  // namespace roundpipe::memory
