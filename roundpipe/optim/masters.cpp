#include <roundpipe/optim/masters.h>

#include <stdexcept>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/bitwise_right_shift.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/fingerprint.h>

namespace roundpipe::optim {

std::optional<c10::ScalarType> remainder_dtype(c10::ScalarType weights, MasterFormat format) {
  if (weights == at::kBFloat16) return format == MasterFormat::k24Bit ? at::kChar : at::kShort;
  if (weights == at::kHalf) return at::kFloat;
  return std::nullopt;
}

bool has_masters(c10::ScalarType weights, MasterFormat format) {
  return format == MasterFormat::kFloat32 || weights == at::kBFloat16;
}

void check_masters(MasterFormat format, c10::ScalarType weights, const std::string& name) {
  if (has_masters(weights, format)) return;
  throw std::invalid_argument(concat("[optim] parameter '", name, "' is ", c10::toString(weights),
                                     ", expected bfloat16, which alone has masters of 24 bits; convert it, or let "
                                     "masters be fp32"));
}

void convert_remainder(const at::Tensor& from, const at::Tensor& to) {
  const at::NoGradGuard no_grad;
  if (from.scalar_type() == to.scalar_type()) {
    to.copy_(from);
  } else if (to.scalar_type() == at::kShort) {
    to.copy_(from).mul_(256);
  } else {
    // 127 at most, so that the nearest bf16 weight is the one that there is.
    to.copy_(from.to(at::kInt).add_(128).bitwise_right_shift_(8).clamp_max_(127));
  }
}

kernels::RandomKey random_key(uint64_t parameter, double step) {
  const uint64_t key = mixed(mixed(parameter) + static_cast<uint64_t>(step));
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

}  // namespace roundpipe::optim
