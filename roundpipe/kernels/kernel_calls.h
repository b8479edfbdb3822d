#pragma once

namespace torch {
class Library;
}

namespace roundpipe::kernels {

// Registers the operators below autograd: each checks its arguments, makes its results, and runs the kernels' code,
// on the host or on a card. Devices that run no kernels compute by torch's own operators (plain_forms.h), which a
// warning says once. For tensors without values, they only make the results.
void add_kernel_calls(torch::Library& library);

}  // namespace roundpipe::kernels
