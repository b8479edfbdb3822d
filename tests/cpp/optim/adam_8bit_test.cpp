#include <cmath>
#include <list>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/parameter_update.h>
#include <roundpipe/optim/thread_pool.h>

#include "bits.h"

using namespace roundpipe::optim;

namespace {

constexpr auto kEightBit = MomentFormat::kBlockwise8Bit;
constexpr auto kAdamW = Algorithm::kAdamW;

// AdamW on weights that start at zero.
struct Run {
  explicit Run(int64_t count, MomentFormat format, Hyperparameters hyper = {})
      : hyper(hyper), format(format), weight(at::zeros({count})), state(make_state(kAdamW, hyper, format, weight)) {}

  void step(const at::Tensor& gradient) {
    update(kAdamW, hyper, format, state, {weight, weight, {}, {}}, gradient, {}, pool);
  }

  ThreadPool pool{1};
  Hyperparameters hyper;
  MomentFormat format;
  at::Tensor weight;
  ParameterState state;
};

}  // namespace

TEST_CASE("8-bit moments: every instruction set gives the same bits") {
  at::manual_seed(7);
  for (const int64_t count : {0, 1, 3, 255, 256, 257, 1000}) {
    std::vector<at::Tensor> gradients;
    for (int step = 0; step < 20; ++step) gradients.push_back(at::randn({count}) * at::randn({count}).exp());
    std::list<Run> runs;
    for (const std::string& set : instruction_sets()) {
      set_instruction_set(set);
      Run& run = runs.emplace_back(count, kEightBit);
      for (const at::Tensor& gradient : gradients) run.step(gradient);
      CHECK(different_bits(run.weight, runs.front().weight) == 0);
      for (size_t i = 0; i < 4; ++i) CHECK(different_bits(run.state.tensors[i], runs.front().state.tensors[i]) == 0);
    }
  }
}

TEST_CASE("8-bit moments: weights stay close to those of fp32 moments") {
  at::manual_seed(8);
  const int64_t count = 2048 + 13;
  const at::Tensor signal = at::randn({count});
  const at::Tensor size = at::randn({count}).exp();
  Run exact(count, MomentFormat::kFloat32);
  Run coded(count, kEightBit);
  for (int step = 0; step < 500; ++step) {
    // The gradients shrink, so slow averages must follow by less than one code per step.
    const at::Tensor gradient = (signal + at::randn({count})) * size * (step < 250 ? 1.0 : 0.2);
    exact.step(gradient);
    coded.step(gradient);
  }
  const double moved = exact.weight.abs().mean().item<double>();
  CHECK((coded.weight - exact.weight).abs().mean().item<double>() < 0.03 * moved);
  CHECK((coded.weight - exact.weight).abs().max().item<double>() < 0.3 * moved);
}

TEST_CASE("8-bit moments: one step's error is bounded by the code's steps") {
  at::manual_seed(9);
  Run exact(2560, MomentFormat::kFloat32);
  Run coded(2560, kEightBit);
  const at::Tensor gradient = at::rand({2560}) * 0.9 + 0.1;
  exact.step(gradient);
  coded.step(gradient);
  CHECK(at::allclose(coded.weight, exact.weight, 1e-6));  // coded only after the update
  exact.step(at::zeros({2560}));
  coded.step(at::zeros({2560}));
  // 1/16 of exp_avg and 1/32 of the root of exp_avg_sq, plus the share of the offset for small ones.
  CHECK(((coded.weight - exact.weight) / (exact.weight - 0)).abs().max().item<double>() < 0.1);
}

TEST_CASE("8-bit moments: zero stays zero, and little is not divided by zero") {
  Run run(512, kEightBit);
  run.step(at::zeros({512}));
  CHECK(run.weight.count_nonzero().item<int64_t>() == 0);
  at::Tensor gradient = at::full({512}, 1e-12);
  gradient[3] = 1e3;
  gradient[5] = 0;
  gradient.narrow(0, 256, 256).fill_(1e-30);
  for (int step = 0; step < 50; ++step) run.step(gradient);
  CHECK(run.weight.isfinite().all().item<bool>());
  CHECK(run.weight.abs().max().item<double>() < 0.1);  // 50 steps of 1e-3 at most
  CHECK(run.weight[5].item<float>() == 0);
}

TEST_CASE("8-bit moments: what is not finite is not hidden") {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    for (const std::string& set : instruction_sets()) {
      set_instruction_set(set);
      Run run(600, kEightBit);
      at::Tensor gradient = at::ones({600});
      gradient[599] = bad;
      run.step(gradient);
      run.step(at::ones({600}));
      CHECK(run.weight[599].isnan().item<bool>());
      CHECK(run.weight.narrow(0, 0, 512).isfinite().all().item<bool>());
    }
  }
}

TEST_CASE("8-bit moments: two bytes a parameter and eight a block, the last one whole") {
  CHECK(state_bytes(kAdamW, {}, kEightBit, {100, 256}) == 2 * 25600 + 8 * 100);
  CHECK(state_bytes(kAdamW, {}, kEightBit, {257}) == 2 * 512 + 8 * 2);
}
