#include <roundpipe/runtime/worker/layer_runner.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/device/make_devices.h>
#include <roundpipe/runtime/submission.h>

#include "support/model.h"
#include "support/observed_device.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;
using roundpipe::device::EventPtr;
using roundpipe::schedule::PlanMode;

namespace layer_runner_test {

constexpr int64_t kWidth = 4;
constexpr double kPatience_ms = 300000;  // ends a test that hangs

// Submits one microbatch as one fused job, and does not wait for it.
CallPtr submit_fused(const std::shared_ptr<ModelState>& model, Engine& engine, RunOptions options) {
  options.route = fused_stages({0, static_cast<int>(model->layer_count())});
  auto call = std::make_shared<Call>(model, options, CallTerms(), 1, 0, 0);
  call->habits = model->habits_of_now();
  call->thread_state.emplace();
  call->autocast = AutocastState::capture(engine.device_type());
  call->trainable = model->trainable();
  for (const BlockState& block : model->blocks) call->readings.push_back(block.block->current());
  const Batch batch = make_batch(1, 3, kWidth);
  call->loss = std::make_shared<SquaredLoss>();
  call->labels = std::make_shared<const std::vector<Values>>(batch.labels);
  call->losses.resize(1);
  call->loss_ready = {call->new_event()};
  ModelPlanner planner(*call->model);
  const auto plan = plan_call(*call, PlanMode::kFused, planner, engine);
  open_boundaries(*call, plan);
  put_inputs(*call, 0, batch.inputs[0], /*copy=*/true, /*pinned=*/false);
  open_gradients(*call, plan);
  submit_jobs(call, plan, /*forward=*/true, /*backward=*/true, engine);
  return call;
}

TEST_SUITE("layer runner") {
  TEST_CASE("a late attempt leaves the buffers alone that the next attempt has saved") {
    at::manual_seed(1);
    const EventPtr saved = roundpipe::device::make_event();  // the second attempt has, and its transfer is under way
    const EventPtr gone = roundpipe::device::make_event();   // nothing of the first attempt's layer remains
    std::vector<std::shared_ptr<roundpipe::device::Health>> health;
    std::atomic<int> attempts{0};
    std::vector<LayerSpec> layers = {norm_layer("norm", kWidth), linear_layer("head", kWidth)};
    layers[0].body = [&, body = layers[0].body](Tensors inputs, const Tensors& parameters, const Tensors& buffers,
                                                const LayerContext& context) {
      Tensors outputs = body(std::move(inputs), parameters, buffers, context);
      if (context.recompute || ++attempts > 1) return outputs;
      // The device of this attempt fails, but its thread goes on, and comes to save what the buffers were.
      health[0]->fail(roundpipe::DeviceError("on purpose"));
      saved->wait_for(kPatience_ms);
      auto kept = std::make_shared<at::Tensor>(outputs[0]);
      outputs[0] =
          at::from_blob(kept->data_ptr(), kept->sizes(), [kept, gone](void*) { gone->fire(); }, kept->options());
      return outputs;
    };
    layers[1].body = [&, body = layers[1].body](Tensors inputs, const Tensors& parameters, const Tensors& buffers,
                                                const LayerContext& context) {
      if (attempts == 2) saved->fire();
      return body(std::move(inputs), parameters, buffers, context);
    };
    const auto model = make_model(layers);
    const auto specs = roundpipe::device::parse_devices("virtual:2");
    std::vector<QueueObserver> observers(2);
    observers[1].on_use = [&](const std::string& queue, const std::string& what) {
      if (queue == "download" && what == "copy") gone->wait_for(kPatience_ms);
    };
    std::vector<std::unique_ptr<roundpipe::device::Device>> devices;
    for (auto& device : roundpipe::device::make_devices(specs)) {
      const size_t index = devices.size();
      devices.push_back(std::make_unique<ObservedDevice>(specs[index], std::move(device), observers[index]));
      health.push_back(devices.back()->health());
    }
    Engine engine(specs, std::move(devices));
    RunOptions options;
    options.fault_tolerant = true;
    options.recompute_grain = RecomputeGrain::kLayer;
    const CallPtr call = submit_fused(model, engine, options);
    REQUIRE(call->finished()->wait_for(kPatience_ms));
    CHECK_FALSE(call->failed());
    CHECK(attempts == 2);
    CHECK(gone->complete());
    CHECK(layers[0].buffers[2].tensor.item<int64_t>() == 1);
  }

  TEST_CASE("a layer runs once its own weights are there, and what runs again takes all of them to be there") {
    for (const RecomputeGrain grain : {RecomputeGrain::kStage, RecomputeGrain::kLayer}) {
      for (const bool runs_out : {false, true}) {
        CAPTURE(grain);
        CAPTURE(runs_out);
        at::manual_seed(1);
        const EventPtr ran = roundpipe::device::make_event();  // the first layer has
        std::atomic<bool> came_first{true};
        std::vector<LayerSpec> layers = {linear_layer("first", kWidth), linear_layer("head", kWidth)};
        layers[0].body = [&, body = layers[0].body](Tensors inputs, const Tensors& parameters, const Tensors& buffers,
                                                    const LayerContext& context) {
          const bool first = !ran->complete();
          ran->fire();
          TORCH_CHECK_WITH(OutOfMemoryError, !first || !runs_out, "none left");
          return body(std::move(inputs), parameters, buffers, context);
        };
        const auto model = make_model(layers);
        QueueObserver observer;
        const at::Tensor head = layers[1].parameters[0].tensor;
        observer.on_copy = [&](const std::string& queue, const at::Tensor& src) {
          const bool is_head = queue == "upload" && src.storage().is_alias_of(head.storage());
          if (is_head && !ran->wait_for(kPatience_ms)) came_first = false;
        };
        // Chunks of a piece each, since an event of a piece fires with its chunk.
        const auto specs = roundpipe::device::parse_devices("virtual:1,chunk=16B");
        std::vector<std::unique_ptr<roundpipe::device::Device>> devices;
        devices.push_back(
            std::make_unique<ObservedDevice>(specs[0], std::move(roundpipe::device::make_devices(specs)[0]), observer));
        Engine engine(specs, std::move(devices));
        RunOptions options;
        options.recompute_grain = grain;
        const CallPtr call = submit_fused(model, engine, options);
        REQUIRE(call->finished()->wait_for(kPatience_ms));
        CHECK_FALSE(call->failed());
        CHECK(came_first);
      }
    }
  }
}

}  // namespace layer_runner_test
