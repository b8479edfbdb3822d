#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/memory/host_value.h>

namespace roundpipe::runtime {

// Values between two layers on a device, without autograd history.
struct Flow {
  std::vector<at::Tensor> tensors;
  std::vector<char> requires_grad;         // as in the uncut model
  std::vector<memory::HostValuePtr> host;  // the same value on the host; null if it is not there
  std::shared_ptr<const void> structure;
};

}  // namespace roundpipe::runtime
