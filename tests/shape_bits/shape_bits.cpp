// A processor whose products have last bits that depend on the sizes of what is multiplied, as those of some do. Loaded
// before a program (LD_PRELOAD), it finds tests that compare the bits of a batch with those of its microbatches.
//
// Numbers with few bits stay as they are, since they are exact on every processor; so do products in 16 bits.
#include <ATen/ATen.h>
#include <ATen/CPUFunctions.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <bit>
#include <cstdint>
#include <optional>
#include <tuple>

namespace {

using at::IntArrayRef;
using at::Scalar;
using at::Tensor;

// -3 to 3.
int ulps_of(IntArrayRef a, IntArrayRef b) {
  uint64_t hash = 1469598103934665603U;
  for (const IntArrayRef sizes : {a, b}) {
    for (const int64_t size : sizes) {
      hash = (hash ^ (static_cast<uint64_t>(size) + 0x9e3779b97f4a7c15U)) * 1099511628211U;
      hash ^= hash >> 29U;
    }
  }
  return static_cast<int>(hash % 7) - 3;
}

// `Bits`: an integer as wide as T, whose lowest bits, those of `low`, are 0 in numbers of few bits.
template <typename T, typename Bits>
void move(Tensor& product, T by, Bits low) {
  T* const values = static_cast<T*>(product.mutable_data_ptr());
  for (int64_t i = 0; i < product.numel(); ++i) {
    if ((std::bit_cast<Bits>(values[i]) & low) != 0) values[i] *= by;
  }
}

Tensor& nudge(Tensor& product, const Tensor& a, const Tensor& b) {
  const int ulps = ulps_of(a.sizes(), b.sizes());
  if (ulps == 0 || !product.is_non_overlapping_and_dense()) return product;
  if (product.scalar_type() == at::kFloat) {
    move<float, uint32_t>(product, 1 + static_cast<float>(ulps) * 0x1p-23F, 0x7ff);
  } else if (product.scalar_type() == at::kDouble) {
    move<double, uint64_t>(product, 1 + ulps * 0x1p-52, 0xfffff);
  }
  return product;
}

Tensor mm(const Tensor& a, const Tensor& b) {
  Tensor product = at::cpu::mm(a, b);
  return nudge(product, a, b);
}
Tensor& mm_out(const Tensor& a, const Tensor& b, Tensor& out) { return nudge(at::cpu::mm_out(out, a, b), a, b); }
Tensor addmm(const Tensor& to, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  Tensor product = at::cpu::addmm(to, a, b, beta, alpha);
  return nudge(product, a, b);
}
Tensor& addmm_out(const Tensor& to, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
                  Tensor& out) {
  return nudge(at::cpu::addmm_out(out, to, a, b, beta, alpha), a, b);
}
Tensor& addmm_(Tensor& to, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  return nudge(at::cpu::addmm_(to, a, b, beta, alpha), a, b);
}
Tensor bmm(const Tensor& a, const Tensor& b) {
  Tensor product = at::cpu::bmm(a, b);
  return nudge(product, a, b);
}
Tensor& bmm_out(const Tensor& a, const Tensor& b, Tensor& out) { return nudge(at::cpu::bmm_out(out, a, b), a, b); }
Tensor baddbmm(const Tensor& to, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  Tensor product = at::cpu::baddbmm(to, a, b, beta, alpha);
  return nudge(product, a, b);
}
std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value, double dropout,
                                     bool causal, const std::optional<Tensor>& mask, std::optional<double> scale) {
  auto result = at::cpu::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, mask, scale);
  nudge(std::get<0>(result), query, key);
  return result;
}

// torch warns of what replaces its own kernels, and tests read what is written: not while these are registered.
struct Silent : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
} silent;
const bool quiet = (c10::WarningUtils::set_warning_handler(&silent), true);

}  // namespace

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("mm", mm);
  library.impl("mm.out", mm_out);
  library.impl("addmm", addmm);
  library.impl("addmm.out", addmm_out);
  library.impl("addmm_", addmm_);
  library.impl("bmm", bmm);
  library.impl("bmm.out", bmm_out);
  library.impl("baddbmm", baddbmm);
  library.impl("_scaled_dot_product_flash_attention_for_cpu", attention);
}

namespace {
const bool loud = (c10::WarningUtils::set_warning_handler(nullptr), true);
}
