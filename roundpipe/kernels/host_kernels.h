#pragma once

namespace torch {
class Library;
}

namespace roundpipe::kernels {

// Registers the operators below autograd that run the kernels' code on the host; for tensors without values, they only
// make the results.
void add_host_kernels(torch::Library& library);

}  // namespace roundpipe::kernels
