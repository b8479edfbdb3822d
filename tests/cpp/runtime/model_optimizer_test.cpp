#include <roundpipe/runtime/model_optimizer.h>

#include <cmath>
#include <limits>

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

Pipeline::TrainResult train(PipedModel& piped, const Batch& batch, const std::shared_ptr<Loss>& loss = nullptr) {
  return piped.pipeline().forward_backward(batch.inputs, batch.labels, loss ? loss : std::make_shared<SquaredLoss>(),
                                           false, along(fused_stages({0, 1, 2, 3})));
}

bool reads_nan(const LayerSpec& layer) { return layer.parameters[0].tensor.isnan().all().item<bool>(); }

// A loss that is infinite on request.
class LossThatOverflows final : public Loss {
 public:
  explicit LossThatOverflows(bool overflow) : factor_(overflow ? std::numeric_limits<double>::infinity() : 1.0) {}
  Tensors operator()(const Values& outputs, const Values& label, const LayerContext&) override {
    return {at::mse_loss(outputs.tensors[0], label.tensors[0]) * factor_};
  }

 private:
  const double factor_;
};

double sum_of_squares(const PlainModel& plain) {
  double sum = 0;
  for (size_t l = 0; l < plain.size(); ++l) {
    for (size_t i = 0; i < 2; ++i) sum += plain.parameter(l, i).grad().to(at::kDouble).square().sum().item<double>();
  }
  return sum;
}

TEST_CASE("fused step: the norm is that of all gradients, and a large one is clipped in both modes") {
  for (const bool asynchronous : {false, true}) {
    CAPTURE(asynchronous);
    at::manual_seed(3);
    use_devices("virtual:2,debug");
    const std::vector<LayerSpec> layers = chain(3);
    PlainModel plain("clip", layers);
    PipedModel piped("clip", layers, /*fused=*/true);
    for (int step = 0; step < 4; ++step) {
      const Batch batch = make_batch(2, 3, kWidth);
      const uint64_t call = piped.pipeline().calls();
      train(piped, batch);
      plain.forward_backward(batch, call);
      const float norm = static_cast<float>(std::sqrt(sum_of_squares(plain)));
      const double limit = step % 2 == 0 ? norm / 3 : norm * 3;
      const auto run = piped.fused_step(0.1, {asynchronous, limit});
      run->decided()->wait();
      CHECK(run->norm() == doctest::Approx(norm).epsilon(1e-6));
      plain.publish();
      plain.scale_gradients(std::min(1.0F, 1.0F / (norm + 1e-6F) * static_cast<float>(limit)));
      plain.update(0.1);
      if (!asynchronous) plain.publish();
    }
    piped.synchronize();
    plain.publish();
    CHECK(same_state(piped, plain, false));
  }
}

TEST_CASE("fused step: inf or NaN under a loss scale changes nothing, and the next step goes on") {
  at::manual_seed(4);
  use_devices("virtual:2");
  const std::vector<LayerSpec> layers = chain(3);
  PipedModel piped("skip", layers, true);
  const Batch batch = make_batch(2, 3, kWidth);
  std::vector<at::Tensor> before;
  for (const LayerSpec& layer : layers) before.push_back(layer.parameters[0].tensor.detach().clone());
  train(piped, batch, std::make_shared<LossThatOverflows>(true));
  const auto skipped = piped.fused_step(0.1, {true}, /*loss_scale=*/1024);
  skipped->finished()->wait();
  CHECK(skipped->overflowed());
  CHECK(skipped->updated_blocks() == 0);
  piped.synchronize();
  for (size_t l = 0; l < layers.size(); ++l) CHECK(at::equal(layers[l].parameters[0].tensor, before[l]));

  train(piped, batch, std::make_shared<LossThatOverflows>(false));
  const auto made = piped.fused_step(0.1, {true}, /*loss_scale=*/1024);
  made->finished()->wait();
  CHECK_FALSE(made->overflowed());
  CHECK(made->updated_blocks() == 3);
  piped.synchronize();
  for (size_t l = 0; l < layers.size(); ++l) CHECK_FALSE(at::equal(layers[l].parameters[0].tensor, before[l]));
}

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
