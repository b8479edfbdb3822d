#pragma once

namespace roundpipe {

// Whether a NaN loss is an error where a model does not say otherwise: unless the environment variable
// ROUNDPIPE_CHECK_LOSS is 0, for programs that cannot be changed, such as benchmarks on weights without values. Throws
// std::invalid_argument if the variable is neither 0 nor 1.
bool checks_losses();

}  // namespace roundpipe
