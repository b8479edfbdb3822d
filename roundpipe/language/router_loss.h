#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include <roundpipe/language/config.h>

namespace roundpipe::language {

// The loss that transformers adds for routers that prefer some experts, with the operators of its
// load_balancing_loss_func. Layers add to sums, which are all that has to go from layer to layer. Thread safety: any
// thread; no state is kept between calls.

// Sums over the layers so far and the tokens of a microbatch, for each expert. fp32.
struct RouterSums {
  at::Tensor chosen;         // how many tokens chose it
  at::Tensor probabilities;  // what its probabilities are together
};

// Of no layer yet, on `device`.
RouterSums no_routers(const ExpertsConfig& experts, c10::Device device);

// The sums with one more layer, whose router has the scores `logits` [rows * tokens, experts]. `attention_mask`: [rows,
// tokens], 0 for tokens that do not count; undefined: all count.
RouterSums with_router(const RouterSums& sums, const ExpertsConfig& experts, const at::Tensor& logits,
                       const at::Tensor& attention_mask);

// The loss of `layers` layers, over `tokens` tokens if there is no attention mask.
at::Tensor router_loss(const RouterSums& sums, int64_t layers, int64_t tokens, const at::Tensor& attention_mask);

}  // namespace roundpipe::language
