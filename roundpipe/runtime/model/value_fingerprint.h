#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe::runtime {

// A fingerprint of a tensor's values: another one is the same only if all bits are, as far as sums can tell. It takes
// no memory for a tensor of the host and, on an accelerator, a thousandth of the tensor's there. Thread safety: the
// thread that computes on the tensor's device.
class ValueFingerprint {
 public:
  // Of the values that the tensor has now or, on an accelerator, once the current stream has come so far.
  explicit ValueFingerprint(const at::Tensor& tensor);

  // REQUIRES: both are of tensors of one device. On an accelerator, blocks until both are computed.
  bool same_as(const ValueFingerprint& other) const;

 private:
  int64_t bytes_ = 0;
  uint32_t checksum_ = 0;         // of a tensor of the host
  std::vector<at::Tensor> sums_;  // of another one
};

}  // namespace roundpipe::runtime
