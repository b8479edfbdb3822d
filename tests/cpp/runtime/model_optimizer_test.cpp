#include <roundpipe/runtime/model_optimizer.h>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/runtime/step/update_thread.h>

#include "support/model.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;

namespace model_optimizer_test {

constexpr int64_t kWidth = 6;

std::vector<LayerSpec> chain(int count) {
  std::vector<LayerSpec> layers;
  for (int l = 0; l < count; ++l) layers.push_back(linear_layer("layer" + std::to_string(l), kWidth));
  return layers;
}

Pipeline::TrainResult train(PipedModel& piped, const Batch& batch) {
  return piped.pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(), false,
                                           along(fused_stages({0, 1, 2, 3})));
}

bool reads_nan(const LayerSpec& layer) { return layer.parameters[0].tensor.isnan().all().item<bool>(); }

TEST_CASE("fused step: two buffers a block, however many steps") {
  for (const bool asynchronous : {false, true}) {
    CAPTURE(asynchronous);
    at::manual_seed(5);
    use_devices("virtual:2");
    const std::vector<LayerSpec> layers = chain(3);
    PipedModel piped("memory", layers, true);
    for (int step = 0; step < 6; ++step) {
      piped.pipeline().submit(make_batch(2, 3, kWidth).inputs, make_batch(2, 3, kWidth).labels,
                              std::make_shared<SquaredLoss>(), false, along(fused_stages({0, 1, 2, 3})));
      piped.fused_step(0.1, {asynchronous});
    }
    piped.synchronize();
    for (const BlockState& block : piped.pipeline().model().blocks) {
      CHECK(block.block->buffers()->host_bytes() <= 2 * block.block->layout().size_bytes);
    }
  }
}

TEST_CASE("fused step: until the new weights are there, parameters read as NaN, never as something else") {
  at::manual_seed(6);
  use_devices("virtual:1");
  const std::vector<LayerSpec> layers = chain(3);
  PipedModel piped("hidden", layers, true);
  const Batch batch = make_batch(1, 3, kWidth);
  train(piped, batch);
  const std::vector<at::Tensor> before = {layers[0].parameters[0].tensor.detach().clone()};
  piped.fused_step(0.1, {false});
  const at::Tensor seen = layers[0].parameters[0].tensor.detach().clone();
  piped.pipeline().weights().show();
  const at::Tensor after = layers[0].parameters[0].tensor.detach().clone();
  CHECK_FALSE(at::equal(after, before[0]));
  CHECK((at::equal(seen, after) || seen.isnan().all().item<bool>()));
  CHECK_FALSE(reads_nan(layers[0]));
}

TEST_CASE(
    "fused step: what the user writes after synchronize counts; written during an asynchronous step it is refused") {
  at::manual_seed(7);
  use_devices("virtual:1");
  const std::vector<LayerSpec> layers = chain(3);
  PipedModel piped("written", layers, true);
  const Batch batch = make_batch(1, 3, kWidth);
  train(piped, batch);
  piped.fused_step(0.1, {true});
  piped.synchronize();
  {
    const at::NoGradGuard no_grad;
    layers[1].parameters[0].tensor.fill_(0.25);
  }
  train(piped, batch);
  piped.fused_step(0.0, {true});
  piped.synchronize();
  CHECK(at::equal(layers[1].parameters[0].tensor, at::full({kWidth, kWidth}, 0.25)));

  train(piped, batch);
  piped.fused_step(0.1, {true});
  {
    const at::NoGradGuard no_grad;
    layers[1].parameters[0].tensor.fill_(0.5);
  }
  train(piped, batch);
  CHECK_THROWS_AS(piped.fused_step(0.1, {true}), std::invalid_argument);
  piped.synchronize();
}

TEST_CASE("fused step: a call that fails after the step leaves the layers without gradients as they are, and says so") {
  at::manual_seed(8);
  use_devices("virtual:1");
  std::vector<LayerSpec> layers = chain(3);
  const auto fault = std::make_shared<Fault>();
  // The first layer's recompute fails when the layers above have been updated, or are about to be.
  layers[0].body = [fault, body = layers[0].body](Tensors inputs, const Tensors& parameters, const Tensors& buffers,
                                                  const LayerContext& context) {
    if (context.recompute) fault->pass("recompute");
    return body(std::move(inputs), parameters, buffers, context);
  };
  PipedModel piped("fails", layers, true);
  const at::Tensor before = layers[0].parameters[0].tensor.detach().clone();
  fault->arm(1);
  const auto submitted =
      piped.pipeline().submit(make_batch(1, 3, kWidth).inputs, make_batch(1, 3, kWidth).labels,
                              std::make_shared<SquaredLoss>(), false, along(fused_stages({0, 1, 2, 3})));
  std::shared_ptr<StepRun> run;
  bool refused = false;
  try {
    run = piped.fused_step(0.1, {true});
  } catch (const InjectedFault&) {
    refused = true;  // the call had failed already, so no step was made
  }
  if (!refused) {
    run->finished()->wait();
    CHECK(run->abandoned_blocks() >= 1);
    CHECK(run->abandoned_blocks() + run->updated_blocks() == 3);
    CHECK_THROWS_AS(piped.synchronize(), InjectedFault);
  }
  piped.synchronize();
  CHECK(at::equal(layers[0].parameters[0].tensor, before));
  fault->disarm();
  train(piped, make_batch(1, 3, kWidth));
  piped.fused_step(0.1, {false});
  piped.synchronize();
  CHECK_FALSE(at::equal(layers[0].parameters[0].tensor, before));
}

TEST_CASE("fused step: nothing is left of a step once it is over") {
  use_devices("virtual:2,debug");
  at::manual_seed(3);
  for (const std::optional<double> max_norm : {std::optional<double>(), std::optional(1.0)}) {
    PipedModel piped("gone", chain(3), /*fused=*/true);
    train(piped, make_batch(2, 3, kWidth));
    const std::weak_ptr<StepRun> step = piped.fused_step(0.1, {/*asynchronous=*/true, max_norm});
    piped.synchronize();
    UpdateThread::instance().drain();
    CHECK(step.expired());
  }
}

}  // namespace model_optimizer_test
