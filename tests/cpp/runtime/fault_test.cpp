#include <atomic>
#include <string>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>

#include "support/model.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;

namespace fault_test {

constexpr int64_t kWidth = 4;
constexpr int64_t kRows = 3;

LayerSpec faulty(LayerSpec layer, std::shared_ptr<Fault> fault) {
  layer.body = [fault, body = layer.body](Tensors inputs, const Tensors& parameters, const Tensors& buffers,
                                          const LayerContext& context) {
    fault->pass("layer");
    return body(std::move(inputs), parameters, buffers, context);
  };
  return layer;
}

struct Setup {
  std::shared_ptr<Fault> fault = std::make_shared<Fault>();
  std::vector<LayerSpec> layers;
  Setup() {
    at::manual_seed(1);
    for (int l = 0; l < 4; ++l) layers.push_back(faulty(linear_layer("l" + std::to_string(l), kWidth), fault));
  }
};

Pipeline::TrainResult train_in(PipedModel& piped, const Batch& batch, std::initializer_list<int> cuts) {
  return piped.pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(), false,
                                           along(fused_stages(cuts)));
}

Pipeline::TrainResult train(PipedModel& piped, const Batch& batch) { return train_in(piped, batch, {0, 1, 2, 4}); }

TEST_SUITE("faults") {
  TEST_CASE("a layer that starts writing to its input, or to a buffer, late ends that step only") {
    for (const bool writes_input : {true, false}) {
      use_devices("virtual:1");
      at::manual_seed(3);
      const auto late = std::make_shared<std::atomic<bool>>(false);
      LayerSpec layer("late");
      layer.buffers = {{"count", at::zeros({1})}};
      layer.body = [late, writes_input](Tensors inputs, const Tensors&, const Tensors& buffers, const LayerContext&) {
        if (late->load()) {
          if (writes_input) {
            inputs[0].mul_(2);
          } else {
            buffers[0].add_(1);
          }
        }
        return inputs;
      };
      const std::vector<LayerSpec> layers = {linear_layer("a", kWidth), layer, linear_layer("b", kWidth)};
      PlainModel plain("m", layers);
      PipedModel piped("m", layers);
      RunOptions options;
      options.recompute_grain = RecomputeGrain::kLayer;
      const auto run = [&](const Batch& batch) {
        return piped.pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(), false,
                                                 along(fused_stages({0, 1, 3}), options));
      };
      const Batch batch = make_batch(1, kRows, kWidth);
      run(batch);
      plain.forward_backward(batch, 0);
      piped.synchronize();
      late->store(true);
      CHECK_THROWS_AS(run(batch), roundpipe::Error);
      run(batch);
      plain.forward_backward(batch, 2);
      piped.synchronize();
      CHECK(same_state(piped, plain, /*with_buffers=*/false));
    }
  }

  TEST_CASE("a layer may start drawing at any time, also one that writes to its input") {
    for (const bool writes : {false, true}) {
      use_devices("virtual:1");
      at::manual_seed(4);
      const auto late = std::make_shared<std::atomic<bool>>(false);
      LayerSpec layer("late");
      layer.body = [late, writes](Tensors inputs, const Tensors&, const Tensors&, const LayerContext&) {
        if (writes) inputs[0].mul_(2);
        if (late->load()) inputs[0] = at::dropout(inputs[0], 0.5, true);
        return inputs;
      };
      const std::vector<LayerSpec> layers = {linear_layer("a", kWidth), layer, linear_layer("b", kWidth)};
      PlainModel plain("m", layers);
      PipedModel piped("m", layers);
      const Batch batch = make_batch(2, kRows, kWidth);
      train_in(piped, batch, {0, 2, 3});
      plain.forward_backward(batch, 0);
      piped.synchronize();
      late->store(true);
      const uint64_t call = piped.pipeline().calls();
      train_in(piped, batch, {0, 2, 3});
      plain.forward_backward(batch, call);
      piped.synchronize();
      CHECK(same_state(piped, plain, true));
    }
  }

  TEST_CASE("a model can be dropped right after a failure") {
    for (int round = 1; round <= 8; ++round) {
      use_devices("virtual:3,debug");
      Setup setup;
      PipedModel piped("m", setup.layers);
      // A recompute may run ahead of the last forwards, and fail after the losses are known.
      const auto train_and_drain = [&] {
        train(piped, make_batch(2, kRows, kWidth));
        piped.pipeline().drain();
      };
      setup.fault->arm(round);
      CHECK_THROWS_AS(train_and_drain(), InjectedFault);
      setup.fault->arm(round);
      CHECK_THROWS_AS(train_and_drain(), InjectedFault);
    }
  }
}

}  // namespace fault_test
