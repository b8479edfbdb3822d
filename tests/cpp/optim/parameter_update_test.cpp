#include <roundpipe/optim/parameter_update.h>

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/thread_pool.h>

#include "bits.h"
#include "reference.h"

using namespace roundpipe::optim;

namespace {

constexpr auto kFloat32 = MomentFormat::kFloat32;

struct Case {
  std::string name;
  Algorithm algorithm;
  Hyperparameters hyper;
};

std::vector<Case> cases() {
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, Algorithm algorithm, auto set) {
    Hyperparameters hyper;
    hyper.lr = 0.01;
    set(hyper);
    cases.push_back({name, algorithm, hyper});
    hyper.maximize = true;
    hyper.weight_decay = 0.1;
    cases.push_back({name + ", maximize, weight decay", algorithm, hyper});
  };
  using H = Hyperparameters;
  add("Adam", Algorithm::kAdam, [](H&) {});
  add("Adam amsgrad", Algorithm::kAdam, [](H& h) { h.amsgrad = true; });
  add("Adam decoupled", Algorithm::kAdam, [](H& h) { h.decoupled_weight_decay = true; });
  add("AdamW", Algorithm::kAdamW, [](H&) {});
  add("AdamW low betas, amsgrad", Algorithm::kAdamW, [](H& h) { h.beta1 = 0.3, h.beta2 = 0.4, h.amsgrad = true; });
  add("SGD", Algorithm::kSGD, [](H&) {});
  add("SGD momentum", Algorithm::kSGD, [](H& h) { h.momentum = 0.9, h.dampening = 0.3; });
  add("SGD nesterov", Algorithm::kSGD, [](H& h) { h.momentum = 0.9, h.nesterov = true; });
  add("Adagrad", Algorithm::kAdagrad, [](H& h) { h.lr_decay = 0.1, h.initial_accumulator_value = 0.5; });
  add("Adadelta", Algorithm::kAdadelta, [](H& h) { h.lr = 1, h.eps = 1e-6; });
  add("Adamax", Algorithm::kAdamax, [](H&) {});
  add("NAdam", Algorithm::kNAdam, [](H&) {});
  add("NAdam decoupled", Algorithm::kNAdam, [](H& h) { h.decoupled_weight_decay = true; });
  add("RAdam", Algorithm::kRAdam, [](H&) {});
  add("RAdam decoupled", Algorithm::kRAdam, [](H& h) { h.decoupled_weight_decay = true; });
  add("RMSprop", Algorithm::kRMSprop, [](H&) {});
  add("RMSprop momentum", Algorithm::kRMSprop, [](H& h) { h.momentum = 0.9; });
  add("RMSprop centered", Algorithm::kRMSprop, [](H& h) { h.centered = true; });
  add("RMSprop centered, momentum", Algorithm::kRMSprop, [](H& h) { h.centered = true, h.momentum = 0.9; });
  add("Rprop", Algorithm::kRprop, [](H&) {});
  add("ASGD", Algorithm::kASGD, [](H& h) { h.t0 = 2, h.alpha = 0.75; });
  add("Lion", Algorithm::kLion, [](H& h) { h.beta2 = 0.99; });
  return cases;
}

enum class Form { kFloat32, kSplit, kMaster };

struct Parameter {
  Weights weights;
  ParameterState state;

  Parameter(const Case& c, Form form, const at::Tensor& initial) {
    at::Tensor master = unaligned(initial);
    weights.before = master;
    if (form == Form::kSplit) {
      weights.before = unaligned(at::empty(initial.sizes(), at::kBFloat16));
      weights.remainder = unaligned(at::empty(initial.sizes(), at::kShort));
      ThreadPool one(1);
      split(master, weights.before, weights.remainder, one);
    } else if (form == Form::kMaster) {
      weights.before = unaligned(initial.to(at::kHalf));
      weights.master = master;
    }
    weights.after = weights.before;
    state = make_state(c.algorithm, c.hyper, kFloat32, initial);
  }

  at::Tensor values() const {
    if (weights.master.defined()) return weights.master;
    if (!weights.remainder.defined()) return weights.before;
    at::Tensor master = at::empty(weights.before.sizes(), at::kFloat);
    ThreadPool one(1);
    join(weights.before, weights.remainder, master, one);
    return master;
  }
};

at::Tensor some_gradient(int64_t count, at::ScalarType dtype) {
  at::Tensor gradient = at::randn({count}) * at::randn({count}).exp();
  if (count > 200) gradient.slice(0, 0, count, 41).zero_();
  return unaligned(gradient.to(dtype));
}

// Sets an instruction set for one test.
struct Using {
  explicit Using(const std::string& name) : before(instruction_set()) { set_instruction_set(name); }
  ~Using() { set_instruction_set(before); }
  const std::string before;
};

}  // namespace

TEST_CASE("update: every instruction set gives the bits of the obvious loop") {
  at::manual_seed(1);
  ThreadPool one(1);
  ThreadPool three(3);
  for (const Case& c : cases()) {
    CAPTURE(c.name);
    for (const int64_t count : {0, 1, 3, 255, 256, 257, 1000}) {
      CAPTURE(count);
      const at::Tensor initial = at::randn({count});
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        const GradientScaling scaling = dtype == at::kHalf ? GradientScaling{1.0F / 1024, 0.7F}
                                                           : GradientScaling{1, dtype == at::kFloat ? 1 : 0.3F};
        std::vector<at::Tensor> gradients;
        for (int step = 0; step < 8; ++step) gradients.push_back(some_gradient(count, dtype));
        std::vector<reference::Element> elements(static_cast<size_t>(count));
        for (int64_t i = 0; i < count; ++i) elements[i].p = initial.const_data_ptr<float>()[i];
        for (size_t step = 0; step < gradients.size(); ++step) {
          const at::Tensor values = gradients[step].to(at::kFloat).contiguous();
          for (int64_t i = 0; i < count; ++i) {
            float g = values.const_data_ptr<float>()[i];
            g *= scaling.inverse_scale;
            g *= scaling.clip;
            reference::step(c.algorithm, c.hyper, elements[i], g, static_cast<double>(step + 1));
          }
        }
        at::Tensor expected = at::empty({count});
        for (int64_t i = 0; i < count; ++i) expected.mutable_data_ptr<float>()[i] = elements[i].p;
        for (const std::string& set : instruction_sets()) {
          CAPTURE(set);
          const Using used(set);
          for (const Form form : {Form::kFloat32, Form::kSplit, Form::kMaster}) {
            CAPTURE(static_cast<int>(form));
            Parameter parameter(c, form, initial);
            for (const at::Tensor& gradient : gradients) {
              update(c.algorithm, c.hyper, kFloat32, parameter.state, parameter.weights, gradient, scaling,
                     set == "baseline" ? one : three);
            }
            REQUIRE(different_bits(parameter.values(), expected) == 0);
            if (form == Form::kMaster) REQUIRE(different_bits(parameter.weights.after, expected.to(at::kHalf)) == 0);
            for (size_t s = 0; s < parameter.state.tensors.size(); ++s) {
              at::Tensor kept = at::empty({count});
              for (int64_t i = 0; i < count; ++i) kept.mutable_data_ptr<float>()[i] = elements[i].s[s];
              REQUIRE(different_bits(parameter.state.tensors[s], kept) == 0);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("update: many threads give the bits of one") {
  at::manual_seed(2);
  const int64_t count = 5 * 65536 + 77;
  const at::Tensor initial = at::randn({count});
  const at::Tensor gradient = at::randn({count}, at::kBFloat16);
  for (const MomentFormat format : {kFloat32, MomentFormat::kBlockwise8Bit}) {
    std::vector<at::Tensor> results;
    for (const int threads : {1, 3}) {
      ThreadPool pool(threads);
      Case c{"AdamW", Algorithm::kAdamW, {}};
      Parameter parameter(c, Form::kSplit, initial);
      parameter.state = make_state(c.algorithm, c.hyper, format, initial);
      for (int step = 0; step < 5; ++step) {
        update(c.algorithm, c.hyper, format, parameter.state, parameter.weights, gradient, {}, pool);
      }
      results.push_back(parameter.values());
    }
    CHECK(different_bits(results[0], results[1]) == 0);
  }
}

TEST_CASE("update: a caller that flushes denormals gets the same bits") {
  const at::Tensor gradient = at::full({70000}, 1e-39);
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    std::vector<at::Tensor> results;
    for (const bool flushes : {false, true}) {
      Case c{"SGD", Algorithm::kSGD, {}};
      c.hyper.lr = 1;
      Parameter parameter(c, Form::kFloat32, at::zeros({70000}));
      at::globalContext().setFlushDenormal(flushes);
      update(c.algorithm, c.hyper, kFloat32, parameter.state, parameter.weights, gradient, {}, pool);
      at::globalContext().setFlushDenormal(false);
      results.push_back(parameter.values());
    }
    CHECK(results[0].count_nonzero().item<int64_t>() == 70000);
    CHECK(different_bits(results[0], results[1]) == 0);
  }
}

TEST_CASE("update: split weights are fp32 weights, bit for bit, for thousands of steps") {
  at::manual_seed(3);
  ThreadPool pool(1);
  Case c{"AdamW", Algorithm::kAdamW, {}};
  c.hyper.weight_decay = 0.1;
  const at::Tensor initial = at::randn({1000});
  Parameter whole(c, Form::kFloat32, initial);
  Parameter split_up(c, Form::kSplit, initial);
  for (int step = 0; step < 2000; ++step) {
    const at::Tensor gradient = some_gradient(1000, at::kBFloat16);
    update(c.algorithm, c.hyper, kFloat32, whole.state, whole.weights, gradient, {}, pool);
    update(c.algorithm, c.hyper, kFloat32, split_up.state, split_up.weights, gradient, {}, pool);
  }
  CHECK(different_bits(split_up.values(), whole.values()) == 0);
  // The device's weight is the nearest bf16, except for ties, which round away from zero.
  const at::Tensor nearest = whole.values().to(at::kBFloat16);
  CHECK((split_up.weights.before.view(at::kShort) - nearest.view(at::kShort)).abs().max().item<int>() <= 1);
}

TEST_CASE("update: the weights after may lie in the gradient's memory") {
  at::manual_seed(4);
  ThreadPool pool(3);
  Case c{"AdamW", Algorithm::kAdamW, {}};
  const at::Tensor initial = at::randn({70000});
  const at::Tensor gradient = at::randn({70000}, at::kBFloat16);
  Parameter apart(c, Form::kSplit, initial);
  update(c.algorithm, c.hyper, kFloat32, apart.state, apart.weights, gradient, {}, pool);
  Parameter together(c, Form::kSplit, initial);
  const at::Tensor memory = gradient.clone();
  together.weights.after = memory;
  update(c.algorithm, c.hyper, kFloat32, together.state, together.weights, memory, {}, pool);
  CHECK(different_bits(memory, apart.weights.after) == 0);
  CHECK(different_bits(together.weights.remainder, apart.weights.remainder) == 0);
}

TEST_CASE("update: what is not finite shows in the weights") {
  ThreadPool pool(1);
  for (const Case& c : cases()) {
    if (c.algorithm == Algorithm::kRprop || c.algorithm == Algorithm::kLion) continue;  // the sign of NaN is 0
    CAPTURE(c.name);
    for (const std::string& set : instruction_sets()) {
      const Using used(set);
      Parameter parameter(c, Form::kSplit, at::ones({300}));
      at::Tensor gradient = at::ones({300});
      gradient[7] = NAN;
      update(c.algorithm, c.hyper, kFloat32, parameter.state, parameter.weights, gradient, {}, pool);
      CHECK(parameter.values()[7].isnan().item<bool>());
      CHECK(parameter.values().isnan().sum().item<int64_t>() == 1);
    }
  }
}

TEST_CASE("update: what does not fit is refused, and changes nothing") {
  ThreadPool pool(1);
  Case c{"AdamW", Algorithm::kAdamW, {}};
  const at::Tensor initial = at::randn({4, 6});
  const auto refused = [&](auto change) {
    Parameter parameter(c, Form::kFloat32, initial.flatten());
    parameter.weights.before = parameter.weights.after = initial.clone();
    parameter.state = make_state(c.algorithm, c.hyper, kFloat32, initial);
    at::Tensor gradient = at::ones({4, 6});
    change(parameter, gradient);
    CHECK_THROWS_AS(update(c.algorithm, c.hyper, kFloat32, parameter.state, parameter.weights, gradient, {}, pool),
                    std::invalid_argument);
    CHECK(parameter.state.scalars.step == 0);
  };
  refused([](Parameter&, at::Tensor& gradient) { gradient = at::ones({4, 5}); });
  refused([](Parameter&, at::Tensor& gradient) { gradient = at::ones({6, 4}).t(); });
  refused([](Parameter&, at::Tensor& gradient) { gradient = at::ones({4, 1}).expand({4, 6}); });
  refused([](Parameter&, at::Tensor& gradient) { gradient = at::ones({4, 6}, at::kDouble); });
  refused([](Parameter& p, at::Tensor&) { p.weights.after = at::ones({4, 6}, at::kBFloat16); });
  refused([](Parameter& p, at::Tensor&) { p.weights.before = p.weights.after = at::ones({4, 6}, at::kBFloat16); });
  refused([](Parameter& p, at::Tensor&) { p.weights.before = p.weights.after = at::ones({4, 6}, at::kHalf); });
  refused([](Parameter& p, at::Tensor&) { p.weights.master = at::ones({4, 6}); });
  refused([](Parameter& p, at::Tensor&) { p.state.tensors.pop_back(); });
  refused([](Parameter& p, at::Tensor&) { p.state.tensors[1] = at::ones({4, 6}, at::kDouble); });
  Hyperparameters amsgrad;
  amsgrad.amsgrad = true;
  const auto eight_bit = MomentFormat::kBlockwise8Bit;
  CHECK_THROWS_AS(make_state(Algorithm::kAdam, amsgrad, eight_bit, initial), std::invalid_argument);
  CHECK_THROWS_AS(make_state(Algorithm::kSGD, {}, eight_bit, initial), std::invalid_argument);
}

TEST_CASE("traffic: what an update reads and writes for each byte of weights") {
  // bf16: gradients 2, weights and remainders 4 and 4, moments 8 and 8, in 26 bytes a parameter.
  CHECK(update_traffic(Algorithm::kAdamW, {}, kFloat32, at::kBFloat16) == 26.0 / 2);
  // Codes of a byte, and a scale of four bytes for 256 elements.
  CHECK(update_traffic(Algorithm::kAdamW, {}, MomentFormat::kBlockwise8Bit, at::kBFloat16) ==
        doctest::Approx((10 + 2 * (2 + 8.0 / 256)) / 2));
  CHECK(update_traffic(Algorithm::kLion, {}, kFloat32, at::kBFloat16) == (10 + 8.0) / 2);
  CHECK(update_traffic(Algorithm::kSGD, {}, kFloat32, at::kBFloat16) == 10.0 / 2);
  // The momentum, and the update in bf16, written and read twice.
  CHECK(update_traffic(Algorithm::kMuon, {}, kFloat32, at::kBFloat16) == (10 + 8.0 + 8.0) / 2);
  // Full masters beside fp16 weights; fp32 weights are their own.
  CHECK(update_traffic(Algorithm::kAdamW, {}, kFloat32, at::kHalf) == (2 + 2 * 6 + 16.0) / 2);
  CHECK(update_traffic(Algorithm::kAdamW, {}, kFloat32, at::kFloat) == (4 + 2 * 4 + 16.0) / 4);
  CHECK(update_traffic(Algorithm::kAdafactor, {}, kFloat32, at::kBFloat16) ==
        doctest::Approx((3 * 2 + 3 * 4.0) / 2).epsilon(0.001));
  CHECK_THROWS_AS(update_traffic(Algorithm::kSGD, {}, kFloat32, at::kDouble), std::invalid_argument);
}

TEST_CASE("state: names, layout and size") {
  const at::Tensor parameter = at::randn({6, 4}).t();
  Hyperparameters hyper;
  hyper.momentum = 0.9;
  hyper.centered = true;
  using Names = std::vector<std::string>;
  CHECK(state_names(Algorithm::kRMSprop, hyper, kFloat32, {4, 6}) ==
        Names{"square_avg", "momentum_buffer", "grad_avg"});
  CHECK(state_names(Algorithm::kAdafactor, hyper, kFloat32, {4, 6}) == Names{"row_var", "col_var"});
  CHECK(state_names(Algorithm::kAdafactor, hyper, kFloat32, {4}) == Names{"variance"});
  CHECK(state_names(Algorithm::kSGD, {}, kFloat32, {4}).empty());
  for (const Case& c : cases()) {
    for (const MomentFormat format : {kFloat32, MomentFormat::kBlockwise8Bit}) {
      const bool adam = c.algorithm == Algorithm::kAdam || c.algorithm == Algorithm::kAdamW;
      if (format != kFloat32 && (!adam || c.hyper.amsgrad)) continue;
      const ParameterState state = make_state(c.algorithm, c.hyper, format, parameter);
      int64_t bytes = 0;
      for (const at::Tensor& tensor : state.tensors) {
        bytes += static_cast<int64_t>(tensor.nbytes());
        if (format == kFloat32) CHECK(tensor.strides() == parameter.strides());
      }
      CHECK(bytes == state_bytes(c.algorithm, c.hyper, format, parameter.sizes()));
      CHECK(state.tensors.size() == state_names(c.algorithm, c.hyper, format, parameter.sizes()).size());
    }
  }
}
