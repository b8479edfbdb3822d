#include <atomic>
#include <chrono>
#include <cmath>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <roundpipe/core/error.h>

#include "../rounds.h"
#include "support/model.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;
using roundpipe::schedule::Range;
using roundpipe::schedule::Stages;

namespace stress_test {

class Dice {
 public:
  explicit Dice(unsigned seed) : engine_(seed) {}
  // In [first, last].
  int between(int first, int last) { return std::uniform_int_distribution<int>(first, last)(engine_); }
  bool one_in(int count) { return between(1, count) == 1; }

 private:
  std::mt19937 engine_;
};

std::vector<LayerSpec> random_layers(Dice& dice, int64_t width) {
  const int count = dice.between(1, 7);
  const int certain = dice.between(0, count - 1);  // linear and trainable, so that there is always a gradient
  std::vector<LayerSpec> layers;
  at::Tensor shared;
  for (int l = 0; l < count; ++l) {
    const int kind = l == certain ? 0 : dice.between(0, 7);
    const std::string name = "layer" + std::to_string(l);
    switch (kind) {
      case 2:
        layers.push_back(norm_layer(name, width));
        break;
      case 3:
        layers.push_back(dropout_layer(name));
        break;
      case 4:
        layers.push_back(mask_layer(name));
        break;
      case 5:
        layers.push_back(inplace_layer(name));
        break;
      case 6:
        layers.push_back(shift_layer(name, width));
        break;
      case 7:
        if (shared.defined()) {
          layers.push_back(tied_layer(name, shared));
          break;
        }
        [[fallthrough]];
      default:
        layers.push_back(linear_layer(name, width));
        if (!shared.defined()) shared = layers.back().parameters[0].tensor;
    }
    if (l == certain || !dice.one_in(4)) continue;
    for (auto& parameter : layers.back().parameters) {
      if (!parameter.tensor.is_same(shared) && dice.one_in(2)) parameter.tensor.set_requires_grad(false);
    }
  }
  return layers;
}

std::vector<Range> random_cuts(Dice& dice, int layers) {
  std::vector<Range> stages;
  for (int first = 0; first < layers;) {
    const int last = dice.between(first + 1, layers);
    stages.push_back({first, last});
    first = last;
  }
  return stages;
}

Stages random_stages(Dice& dice, int layers, bool fused) {
  Stages stages;
  const auto backward = random_cuts(dice, layers);
  stages.backward = {backward.rbegin(), backward.rend()};
  stages.forward = random_cuts(dice, fused ? stages.backward.front().first : layers);
  return stages;
}

std::string random_devices(Dice& dice) {
  std::string devices = "virtual:" + std::to_string(dice.between(1, 4));
  if (dice.one_in(4)) devices += ",link=0.05GB/s";
  if (dice.one_in(2)) devices += ",debug";
  return devices;
}

// The identity, whose backward may throw.
class BackwardFault : public torch::autograd::Function<BackwardFault> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input, int64_t fault) {
    context->saved_data["fault"] = fault;
    return input.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    reinterpret_cast<Fault*>(context->saved_data["fault"].toInt())->pass("backward");
    return {gradients[0], at::Tensor()};
  }
};

struct Faults {
  std::shared_ptr<Fault> forward = std::make_shared<Fault>();
  std::shared_ptr<Fault> backward = std::make_shared<Fault>();
  std::shared_ptr<Fault> loss = std::make_shared<Fault>();
};

std::vector<LayerSpec> with_faults(std::vector<LayerSpec> layers, const Faults& faults) {
  for (LayerSpec& layer : layers) {
    layer.body = [faults, body = layer.body](Tensors inputs, const Tensors& parameters, const Tensors& buffers,
                                             const LayerContext& context) {
      faults.forward->pass("forward");
      Tensors outputs = body(std::move(inputs), parameters, buffers, context);
      outputs[0] = BackwardFault::apply(outputs[0], reinterpret_cast<int64_t>(faults.backward.get()));
      return outputs;
    };
  }
  return layers;
}

void check_losses(const std::vector<Tensors>& losses, const std::vector<Tensors>& expected) {
  REQUIRE(losses.size() == expected.size());
  for (size_t m = 0; m < losses.size(); ++m) {
    for (size_t i = 0; i < losses[m].size(); ++i) CHECK(same_bits(losses[m][i], expected[m][i]));
  }
}

// Trains one random model for a few random steps beside the plain loop.
void run_case(unsigned seed, bool inject, bool fused) {
  CAPTURE(seed);
  Dice dice(seed);
  at::manual_seed(seed);
  const int64_t width = dice.between(1, 9);
  const int64_t rows = dice.between(2, 4);
  const Faults faults;
  std::vector<LayerSpec> layers = random_layers(dice, width);
  PlainModel plain("stress", layers);
  if (inject) layers = with_faults(layers, faults);
  PipedModel piped("stress", layers, fused);
  use_devices(random_devices(dice));
  RunOptions options;
  options.recompute_grain = dice.one_in(2) ? RecomputeGrain::kLayer : RecomputeGrain::kStage;
  const int layer_count = static_cast<int>(layers.size());
  bool failed = false;
  const int steps = dice.between(2, 4);
  for (int step = 0; step < steps; ++step) {
    const int calls = dice.between(1, 2);
    for (int call = 0; call < calls; ++call) {
      const Batch batch = make_batch(dice.between(1, 4), rows, width);
      if (inject && dice.one_in(2)) {
        // A call that fails somewhere; if it ends before the fault, it must leave nothing behind either.
        const std::shared_ptr<Fault> kinds[] = {faults.forward, faults.backward, faults.loss};
        const std::shared_ptr<Fault>& fault = kinds[dice.between(0, 2)];
        // Calls that still run must succeed.
        piped.synchronize();
        plain.publish();
        fault->arm(dice.between(1, 8));
        try {
          std::vector<Values> labels = batch.labels;
          labels.back().tensors.front() = at::full_like(labels.back().tensors.front(), std::nan(""));
          piped.pipeline().forward_backward(batch.inputs, labels, std::make_shared<SquaredLoss>(faults.loss), false,
                                            along(random_stages(dice, layer_count, true), options),
                                            {.refuses_nan = true});
          FAIL("a NaN loss must throw");
        } catch (const InjectedFault&) {
        } catch (const roundpipe::Error&) {
        }
        fault->disarm();
        failed = true;
      }
      const uint64_t index = piped.pipeline().calls();
      const auto result =
          piped.pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(faults.loss),
                                            false, along(random_stages(dice, layer_count, true), options));
      check_losses(result.losses, plain.forward_backward(batch, index).losses);
      if (dice.one_in(6)) use_devices(random_devices(dice));
    }
    if (dice.one_in(4)) {
      const at::NoGradGuard no_grad;
      const Batch batch = make_batch(dice.between(1, 3), rows, width);
      RunOptions inference = options;
      inference.requires_grad = false;
      Stages stages;
      stages.forward = random_cuts(dice, layer_count);
      const uint64_t index = piped.pipeline().calls();
      const auto outputs = piped.pipeline().forward(batch.inputs, along(stages, inference));
      for (size_t m = 0; m < batch.inputs.size(); ++m) {
        const at::Tensor expected = plain.forward(batch.inputs[m].tensors, index, static_cast<int>(m))[0];
        CHECK(same_bits(outputs.microbatches[m].tensors[0], expected));
      }
    }
    if (dice.one_in(4)) {
      piped.synchronize();
      plain.publish();
    }
    const bool asynchronous = !dice.one_in(3);
    piped.step(0.1, asynchronous);
    plain.publish();
    plain.update(0.1);
    if (!asynchronous) plain.publish();
  }
  piped.synchronize();
  plain.publish();
  CHECK(same_state(piped, plain, /*with_buffers=*/!failed));
}

unsigned cases(int few, int all) { return static_cast<unsigned>(rounds(few, all)); }

TEST_SUITE("stress") {
  TEST_CASE("random models, plans, devices and steps: the plain loop's bits") {
    for (unsigned seed = 0; seed < cases(60, 200); ++seed) run_case(seed, /*inject=*/false, /*fused=*/seed % 2 == 1);
  }

  TEST_CASE("after an error anywhere, the next good step is the plain loop's") {
    for (unsigned seed = 1000; seed < 1000 + cases(40, 100); ++seed)
      run_case(seed, /*inject=*/true, /*fused=*/seed % 2 == 1);
  }

  TEST_CASE("any event may come late: the same bits") {
    // The sleep is not a wait: the test must hold however long each completion takes.
    std::atomic<unsigned> count{0};
    roundpipe::device::set_completion_hook([&count] {
      const unsigned draw = (count++ * 2654435761U) >> 24;
      if (draw < 24) std::this_thread::sleep_for(std::chrono::microseconds(draw * 40));
    });
    for (unsigned seed = 2000; seed < 2000 + cases(20, 60); ++seed)
      run_case(seed, /*inject=*/seed % 3 == 0, /*fused=*/seed % 2 == 1);
    use_devices("virtual:1");
    roundpipe::device::set_completion_hook(nullptr);
  }
}

}  // namespace stress_test
