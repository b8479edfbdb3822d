#pragma once

#include <string>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/hyperparameters.h>
#include <roundpipe/optim/parameter_update.h>
#include <roundpipe/optim/thread_pool.h>

#include "bits.h"

namespace roundpipe::optim {

// Checks that three steps from `initial`, fp32, with a random gradient have the same bits for every instruction set,
// one thread and several, and weights in one tensor or as 16 bits and their remainder.
inline void check_same_bits_everywhere(Algorithm algorithm, const Hyperparameters& hyper, const at::Tensor& initial) {
  constexpr auto kMoments = MomentFormat::kFloat32;
  const at::Tensor gradient = at::randn(initial.sizes(), at::kBFloat16);
  at::Tensor expected;
  for (const std::string& set : instruction_sets()) {
    set_instruction_set(set);
    for (const int threads : {1, 3}) {
      ThreadPool pool(threads);
      const at::Tensor weight = initial.clone();
      const at::Tensor upper = at::empty(initial.sizes(), at::kBFloat16);
      const at::Tensor remainder = at::empty(initial.sizes(), at::kShort);
      split(initial, upper, remainder, pool);
      ParameterState state = make_state(algorithm, hyper, kMoments, weight);
      ParameterState split_state = make_state(algorithm, hyper, kMoments, weight);
      for (int step = 0; step < 3; ++step) {
        update(algorithm, hyper, kMoments, state, {weight, weight, {}, {}}, gradient, {0.5F, 0.7F}, pool);
        update(algorithm, hyper, kMoments, split_state, {upper, upper, remainder, {}}, gradient, {0.5F, 0.7F}, pool);
      }
      const at::Tensor joined = at::empty(initial.sizes());
      join(upper, remainder, joined, pool);
      if (!expected.defined()) expected = weight;
      CHECK(different_bits(weight, expected) == 0);
      CHECK(different_bits(joined, expected) == 0);
    }
  }
}

}  // namespace roundpipe::optim
