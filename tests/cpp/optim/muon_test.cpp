#include <roundpipe/optim/muon.h>

#include <cmath>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Version.h>
#include <doctest/doctest.h>

#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/hyperparameters.h>
#include <roundpipe/optim/muon_parameters.h>
#include <roundpipe/optim/parameter_update.h>
#include <roundpipe/optim/thread_pool.h>

#include "bits.h"
#include "same_bits_everywhere.h"

using namespace roundpipe::optim;

namespace {

constexpr auto kMuon = Algorithm::kMuon;
constexpr auto kFp32Moments = MomentFormat::kFloat32;

Hyperparameters muon_hyper() {
  Hyperparameters hyper = default_hyperparameters(kMuon);
  hyper.lr = 0.02;
  return hyper;
}

// torch.optim.Muon's step of one matrix, line by line.
void torch_step(const Hyperparameters& h, const at::Tensor& p, const at::Tensor& buffer, const at::Tensor& g) {
  buffer.lerp_(g, 1 - h.momentum);
  at::Tensor x = (h.nesterov ? g.lerp(buffer, h.momentum) : buffer).to(at::kBFloat16);
  const bool is_tall = p.size(0) > p.size(1);
  if (is_tall) x = x.t();
  x.div_(at::linalg_vector_norm(x, 2).clamp(h.eps));
  for (int i = 0; i < static_cast<int>(h.ns_steps); ++i) {
    const at::Tensor gram = at::matmul(x, x.t());
    x = at::addmm(x, at::addmm(gram, gram, gram, h.ns_b, h.ns_c), x, h.ns_a);
  }
  if (is_tall) x = x.t();
  const double height = static_cast<double>(p.size(0)), width = static_cast<double>(p.size(1));
  const double ratio =
      h.match_rms_adamw ? 0.2 * std::sqrt(std::max(height, width)) : std::sqrt(std::max(1.0, height / width));
  p.mul_(1 - h.lr * h.weight_decay).add_(x, -(h.lr * ratio));
}

}  // namespace

TEST_CASE("Muon: torch's bits, for wide and tall matrices, other layouts and options") {
  // torch's kernels for any processor round twice where the others, as ours, fuse a product and a sum.
  const bool fuses = at::get_cpu_capability() != "DEFAULT";
  at::manual_seed(30);
  ThreadPool pool(2);
  const std::vector<at::Tensor> parameters = {at::randn({96, 160}), at::randn({160, 96}), at::randn({64, 64}),
                                              at::randn({300, 520}).t(), at::randn({16, 16}).t()};
  for (const at::Tensor& initial : parameters) {
    for (const int variant : {0, 1, 2}) {
      CAPTURE(initial.sizes());
      CAPTURE(variant);
      Hyperparameters hyper = muon_hyper();
      hyper.nesterov = variant != 1;
      hyper.match_rms_adamw = variant == 1;
      if (variant == 2) hyper.momentum = 0.3, hyper.ns_steps = 2, hyper.weight_decay = 0;
      const at::Tensor weight = initial.clone(), expected = initial.clone(), buffer = at::zeros_like(initial);
      ParameterState state = make_state(kMuon, hyper, kFp32Moments, weight);
      for (int step = 1; step <= 3; ++step) {
        const at::Tensor gradient = at::randn_like(weight);
        update(kMuon, hyper, kFp32Moments, state, {weight, weight, {}, {}}, gradient, {}, pool);
        torch_step(hyper, expected, buffer, gradient);
      }
      CHECK(state.scalars.step == 3);
      if (fuses) {
        CHECK(different_bits(state.tensors[0], buffer) == 0);
        CHECK(different_bits(weight, expected) == 0);
      } else {
        CHECK(at::allclose(state.tensors[0], buffer, 1e-5, 1e-6));
        // A part of a step of 0.02 by the last bit of the bf16 that it is computed in.
        CHECK(at::allclose(weight, expected, 0, 1e-3));
      }
    }
  }
}

TEST_CASE("Muon: each matrix of a stack is stepped as alone") {
  at::manual_seed(31);
  ThreadPool pool(2);
  const Hyperparameters hyper = muon_hyper();
  const at::Tensor stack = at::randn({3, 80, 48}), gradient = at::randn({3, 80, 48});
  const at::Tensor weight = stack.clone();
  ParameterState state = make_state(kMuon, hyper, kFp32Moments, weight);
  update(kMuon, hyper, kFp32Moments, state, {weight, weight, {}, {}}, gradient, {}, pool);
  for (int i = 0; i < 3; ++i) {
    const at::Tensor alone = stack[i].clone();
    ParameterState own = make_state(kMuon, hyper, kFp32Moments, alone);
    update(kMuon, hyper, kFp32Moments, own, {alone, alone, {}, {}}, gradient[i].clone(), {}, pool);
    CHECK(different_bits(alone, weight[i].clone()) == 0);
  }
}

TEST_CASE("Muon: the same bits for every instruction set, number of threads and form of weights") {
  at::manual_seed(32);
  check_same_bits_everywhere(kMuon, muon_hyper(), at::randn({300, 700}));
}

TEST_CASE("Muon: the new weights may take the memory of the gradient; what is not finite shows") {
  at::manual_seed(33);
  ThreadPool pool(2);
  const Hyperparameters hyper = muon_hyper();
  const at::Tensor weight = at::randn({40, 60}), gradient = at::randn({40, 60});
  ParameterState apart = make_state(kMuon, hyper, kFp32Moments, weight), together = apart;
  together.tensors[0] = apart.tensors[0].clone();
  const at::Tensor after = at::empty_like(weight), memory = gradient.clone();
  update(kMuon, hyper, kFp32Moments, apart, {weight, after, {}, {}}, gradient, {}, pool);
  update(kMuon, hyper, kFp32Moments, together, {weight, memory, {}, {}}, memory, {}, pool);
  CHECK(different_bits(memory, after) == 0);
  gradient[3][7] = NAN;
  update(kMuon, hyper, kFp32Moments, apart, {weight, after, {}, {}}, gradient, {}, pool);
  CHECK(after.isnan().all().item<bool>());
}

TEST_CASE("Muon: AdamW steps the groups that Muon is not for") {
  at::manual_seed(34);
  ThreadPool pool(2);
  Hyperparameters rule = muon_hyper();
  const Hyperparameters hyper = GivenHyperparameters{.weight_decay = 0.25, .use_muon = false}.over(rule);
  CHECK(hyper.eps == Hyperparameters().eps);
  CHECK(GivenHyperparameters{.eps = 1e-3, .use_muon = false}.over(rule).eps == 1e-3);
  CHECK(state_names(kMuon, hyper, kFp32Moments, {7}) == std::vector<std::string>{"exp_avg", "exp_avg_sq"});
  CHECK(state_names(kMuon, rule, kFp32Moments, {7, 5}) == std::vector<std::string>{"momentum_buffer"});
  const at::Tensor initial = at::randn({7}), gradient = at::randn({7});
  const at::Tensor weight = initial.clone(), expected = initial.clone();
  ParameterState state = make_state(kMuon, hyper, kFp32Moments, weight);
  ParameterState of_adamw = make_state(Algorithm::kAdamW, hyper, kFp32Moments, expected);
  for (int step = 0; step < 3; ++step) {
    update(kMuon, hyper, kFp32Moments, state, {weight, weight, {}, {}}, gradient, {}, pool);
    update(Algorithm::kAdamW, hyper, kFp32Moments, of_adamw, {expected, expected, {}, {}}, gradient, {}, pool);
  }
  CHECK(different_bits(weight, expected) == 0);
}

TEST_CASE("Muon: what it does not step is refused by name") {
  ThreadPool pool(1);
  const Hyperparameters hyper = muon_hyper();
  CHECK_NOTHROW(check_sizes(kMuon, hyper, {4, 6}, "0.weight"));
  CHECK_NOTHROW(check_sizes(kMuon, hyper, {2, 4, 6}, "0.experts"));
  CHECK_NOTHROW(check_sizes(kMuon, Hyperparameters{.use_muon = false}, {4}, "0.bias"));
  CHECK_NOTHROW(check_sizes(Algorithm::kAdamW, hyper, {4}, "0.bias"));
  CHECK_THROWS_WITH_AS(check_sizes(kMuon, hyper, {4}, "0.bias"),
                       doctest::Contains("parameter '0.bias' is of shape [4]"), std::invalid_argument);
  const at::Tensor vector = at::ones({4});
  ParameterState state = make_state(kMuon, hyper, kFp32Moments, vector);
  CHECK_THROWS_AS(update(kMuon, hyper, kFp32Moments, state, {vector, vector, {}, {}}, vector.clone(), {}, pool),
                  std::invalid_argument);
  CHECK_THROWS_AS(make_state(kMuon, hyper, MomentFormat::kBlockwise8Bit, at::ones({4, 4})), std::invalid_argument);
}
