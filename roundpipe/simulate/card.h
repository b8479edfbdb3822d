#pragma once

#include <cstdint>

namespace roundpipe::simulate {

// What a device does for a layer and one microbatch, as far as its time depends on it.
struct LayerWork {
  double product_operations = 0;    // floating-point operations of matrix products
  double attention_operations = 0;  // those inside fused attention
  double element_bytes = 0;         // of device memory that all other kernels read and write
  double products = 0;              // kernels of each kind
  double attentions = 0;
  double element_kernels = 0;

  LayerWork& operator+=(const LayerWork& other);
  LayerWork& operator-=(const LayerWork& other);
};

// Adding a microbatch's gradients, of so many bytes in 16 bits, to sums in fp32.
LayerWork gradient_sums(std::int64_t gradient_bytes);

// How fast a device is. Rates of 0 are infinite.
struct Card {
  double product_tflops = 0;    // 1e12 operations per second of matrix products, in the weights' dtype
  double attention_tflops = 0;  // of fused attention
  double memory_gb_per_s = 0;   // of the device's memory, 1e9 bytes per second, reads and writes together
  double launch_us = 0;         // between the starts of two kernels that have nothing to do
};

// Milliseconds of the work. Each kind of kernel takes its share at the card's rate for it, one after the other; the
// host launches kernels meanwhile, so no work is faster than its launches. Throws std::invalid_argument, naming the
// field, unless all fields are finite and not negative.
double time_ms(const LayerWork& work, const Card& card);

}  // namespace roundpipe::simulate
