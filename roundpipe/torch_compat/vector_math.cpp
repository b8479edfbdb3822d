#include <roundpipe/torch_compat/vector_math.h>

#include <mutex>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/zeros.h>

namespace roundpipe::torch_compat {

void settle_vector_math() {
  static std::once_flag once;
  std::call_once(once, [] {
    const at::NoGradGuard no_grad;
    // Too few elements for a second thread.
    at::cos(at::zeros({8}, at::kFloat));
  });
}

}  // namespace roundpipe::torch_compat
