#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/memory/host_value.h>

namespace roundpipe::runtime {

// Values between two layers on a device, without autograd history.
struct Flow {
  std::vector<at::Tensor> tensors;
  std::vector<char> requires_grad;         // whether the uncut model's tensor would
  std::vector<memory::HostValuePtr> host;  // where the same value already lies on the host; null if nowhere
  std::shared_ptr<const void> structure;
};

}  // namespace roundpipe::runtime
