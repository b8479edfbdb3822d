#pragma once

#include <string>
#include <string_view>

namespace roundpipe {

// The form in which native layers, heads, packed attention and sums of gradients compute.
// kExact: with the operators of transformers' and torch's code, in their order, and so with their bits.
// kFast: with fused kernels (roundpipe/kernels), which read and write a third as much, compute in fp32 and round each
// result once. Its bits are other ones, as near to the true result, and like the exact ones the same on any number of
// devices and from run to run. What has no fast form computes exactly.
enum class Arithmetic : int { kExact, kFast };

// Of a training that says nothing.
inline constexpr Arithmetic kDefaultArithmetic = Arithmetic::kExact;

// "exact" or "fast". Throws std::invalid_argument for another name.
Arithmetic parse_arithmetic(std::string_view name);
std::string_view arithmetic_name(Arithmetic arithmetic);

// For the user whose training goes on with another form than it had: its bits are not those of one that was never
// interrupted. Empty: with the same. `saved`: empty for a checkpoint from before there were two. `model`: its name.
std::string changed_arithmetic(std::string_view saved, Arithmetic own, const std::string& model);

}  // namespace roundpipe
