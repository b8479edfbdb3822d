#include <roundpipe/optim/adafactor.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/parameter_update.h>
#include <roundpipe/optim/thread_pool.h>

#include "bits.h"
#include "same_bits_everywhere.h"

using namespace roundpipe::optim;

namespace {

constexpr auto kAdafactor = Algorithm::kAdafactor;

Hyperparameters some_hyper() {
  Hyperparameters hyper;
  hyper.lr = 0.05;
  hyper.eps = 1e-7;
  hyper.weight_decay = 0.1;
  return hyper;
}

// The formula in fp64, with tensor operations.
struct Reference {
  at::Tensor p, row, column;

  void step(const Hyperparameters& h, at::Tensor g, double t) {
    if (h.maximize) g = -g;
    const double weight = std::pow(t, h.beta2_decay);
    const double norm = p.norm().item<double>() / std::sqrt(static_cast<double>(p.numel()));
    const double alpha = std::max(h.eps2, norm) * std::min(h.lr, 1 / std::sqrt(t));
    p = p * (1 - h.lr * h.weight_decay);
    at::Tensor variance;
    if (p.dim() > 1) {
      row = row.lerp(g.square().mean(-1, true), weight);
      column = column.lerp(g.square().mean(-2, true), weight);
      variance = row.matmul(column) / row.mean(-2, true).clamp_min(h.eps);
    } else {
      row = row.lerp(g.square(), weight);
      variance = row;
    }
    const at::Tensor update = g * variance.clamp_min(h.eps * h.eps).rsqrt();
    const double size = update.norm().item<double>() / std::sqrt(static_cast<double>(p.numel()));
    p = p - update * (alpha / std::max(1.0, size / h.clip_threshold));
  }
};

}  // namespace

TEST_CASE("Adafactor: follows the formula for vectors, matrices, batches and other layouts") {
  at::manual_seed(10);
  ThreadPool pool(2);
  Hyperparameters hyper = some_hyper();
  const std::vector<at::Tensor> parameters = {at::randn({700}),      at::randn({}),           at::randn({1, 1}),
                                              at::randn({300, 517}), at::randn({40, 30}).t(), at::randn({3, 2, 5, 7}),
                                              at::randn({2, 0})};
  for (const at::Tensor& initial : parameters) {
    CAPTURE(initial.sizes());
    const at::Tensor weight = initial.clone();
    ParameterState state = make_state(kAdafactor, hyper, MomentFormat::kFloat32, weight);
    Reference reference{initial.to(at::kDouble), state.tensors[0].to(at::kDouble),
                        state.tensors.back().to(at::kDouble)};
    for (int step = 1; step <= 10; ++step) {
      hyper.maximize = step > 5;
      const at::Tensor gradient = at::randn_like(weight);
      update(kAdafactor, hyper, MomentFormat::kFloat32, state, {weight, weight, {}, {}}, gradient, {}, pool);
      if (weight.numel() > 0) reference.step(hyper, gradient.to(at::kDouble), step);
    }
    CHECK(state.scalars.step == 10);
    CHECK(at::allclose(weight.to(at::kDouble), reference.p, 1e-5, 1e-6));
  }
}

TEST_CASE("Adafactor: the same bits for every instruction set, number of threads and form of weights") {
  at::manual_seed(11);
  check_same_bits_everywhere(kAdafactor, some_hyper(), at::randn({700, 300}));
}
