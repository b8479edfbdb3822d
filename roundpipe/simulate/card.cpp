#include <roundpipe/simulate/card.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe::simulate {

namespace {

void require(double value, const char* field) {
  if (!(value >= 0) || !std::isfinite(value))
    throw std::invalid_argument(concat("[time_ms] ", field, " is ", value, ", expected a finite number from 0 up"));
}

double ms(double amount, double per_ms) { return per_ms > 0 ? amount / per_ms : 0; }

}  // namespace

LayerWork& LayerWork::operator+=(const LayerWork& other) {
  product_operations += other.product_operations;
  attention_operations += other.attention_operations;
  element_bytes += other.element_bytes;
  products += other.products;
  attentions += other.attentions;
  element_kernels += other.element_kernels;
  return *this;
}

LayerWork& LayerWork::operator-=(const LayerWork& other) {
  product_operations -= other.product_operations;
  attention_operations -= other.attention_operations;
  element_bytes -= other.element_bytes;
  products -= other.products;
  attentions -= other.attentions;
  element_kernels -= other.element_kernels;
  return *this;
}

LayerWork gradient_sums(std::int64_t gradient_bytes) {
  // The gradient is read, its sum read and written.
  return {.element_bytes = 5.0 * static_cast<double>(gradient_bytes)};
}

double time_ms(const LayerWork& work, const Card& card) {
  require(work.product_operations, "product_operations");
  require(work.attention_operations, "attention_operations");
  require(work.element_bytes, "element_bytes");
  const double kernels = work.products + work.attentions + work.element_kernels;
  require(kernels, "the number of kernels");
  require(card.product_tflops, "product_tflops");
  require(card.attention_tflops, "attention_tflops");
  require(card.memory_gb_per_s, "memory_gb_per_s");
  require(card.launch_us, "launch_us");
  constexpr double kOperationsPerMs = 1e9, kBytesPerMs = 1e6;  // of 1e12 and 1e9 a second
  const double running_ms = ms(work.product_operations, card.product_tflops * kOperationsPerMs) +
                            ms(work.attention_operations, card.attention_tflops * kOperationsPerMs) +
                            ms(work.element_bytes, card.memory_gb_per_s * kBytesPerMs);
  return std::max(running_ms, kernels * card.launch_us / 1000);
}

}  // namespace roundpipe::simulate
