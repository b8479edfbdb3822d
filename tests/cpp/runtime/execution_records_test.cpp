// The records of calls on devices that run later than the host issues, and the planner's use of them.
#include <algorithm>
#include <map>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/device/make_devices.h>
#include <roundpipe/runtime/engine.h>
#include <roundpipe/runtime/submission.h>

#include "support/late_device.h"
#include "support/model.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;
using roundpipe::device::Device;
using roundpipe::schedule::Phase;
using roundpipe::schedule::Plan;
using roundpipe::schedule::PlanMode;

namespace execution_records_test {

constexpr int64_t kWidth = 4;
constexpr int kLayers = 3;
constexpr int kMicrobatches = 4;
constexpr double kForward_ms = 4, kBackward_ms = 6;
constexpr double kRounding_ms = 1e-6;

// Takes a given time on the device, in either direction.
LayerSpec slow_layer(const std::string& name, double backward_ms = kBackward_ms) {
  LayerSpec layer = linear_layer(name, kWidth);
  layer.body = [body = layer.body, backward_ms](Tensors inputs, const Tensors& parameters, const Tensors& buffers,
                                                const LayerContext& context) {
    Tensors outputs = body(std::move(inputs), parameters, buffers, context);
    context.queue->emulate(kForward_ms);
    if (outputs[0].requires_grad()) {
      outputs[0].register_hook([queue = context.queue, backward_ms](const at::Tensor& gradient) {
        queue->emulate(backward_ms);
        return gradient;
      });
    }
    return outputs;
  };
  return layer;
}

struct LatePool {
  LatePool(int devices, std::shared_ptr<ModelState> state) : model(std::move(state)) {
    const auto specs = roundpipe::device::parse_devices("virtual:" + std::to_string(devices));
    std::vector<std::unique_ptr<Device>> late;
    size_t index = 0;
    for (auto& device : roundpipe::device::make_devices(specs)) {
      late.push_back(std::make_unique<LateDevice>(specs[index++], std::move(device)));
    }
    engine = std::make_unique<Engine>(specs, std::move(late));
  }

  CallPtr submit(roundpipe::schedule::Stages stages, uint64_t index) {
    RunOptions options;
    options.microbatches = kMicrobatches;
    options.route = std::move(stages);
    auto call = std::make_shared<Call>(model, options, CallTerms(), 5000 + index, index, 0);
    call->habits = model->habits_of_now();
    call->thread_state.emplace();
    call->autocast = AutocastState::capture(engine->device_type());
    call->trainable = model->trainable();
    call->position = index;
    call->loss = std::make_shared<SquaredLoss>();
    call->losses.resize(kMicrobatches);
    for (const BlockState& block : model->blocks) call->readings.push_back(block.block->current());
    for (int m = 0; m < kMicrobatches; ++m) call->loss_ready.push_back(call->new_event());
    const Batch batch = make_batch(kMicrobatches, 2, kWidth);
    call->labels = std::make_shared<const std::vector<Values>>(batch.labels);
    ModelPlanner planner(*model);
    const Plan plan = plan_call(*call, PlanMode::kFused, planner, *engine);
    open_boundaries(*call, plan);
    for (int m = 0; m < kMicrobatches; ++m) {
      put_inputs(*call, m, batch.inputs[static_cast<size_t>(m)], /*copy=*/true, /*pinned=*/false);
    }
    open_gradients(*call, plan);
    submit_jobs(call, plan, /*forward=*/true, /*backward=*/true, *engine);
    return call;
  }

  std::shared_ptr<ModelState> model;
  std::unique_ptr<Engine> engine;
};

double least_ms(const ExecutionRecord& record) {
  const double forward_ms = kForward_ms * record.layers.size(), backward_ms = kBackward_ms * record.layers.size();
  return record.phase == Phase::kForward ? forward_ms : forward_ms + backward_ms;
}

TEST_SUITE("execution records") {
  TEST_CASE("of one device never overlap, and say what the device took, though the host has long gone on") {
    for (const int devices : {1, 2}) {
      std::vector<std::unique_ptr<Layer>> layers;
      for (int l = 0; l < kLayers; ++l) layers.push_back(std::make_unique<NativeLayer>(slow_layer("l")));
      LatePool pool(devices, std::make_shared<ModelState>("model", std::move(layers), /*pinned=*/false));
      std::vector<CallPtr> calls;
      for (uint64_t step = 0; step < 3; ++step) calls.push_back(pool.submit(fused_stages({0, 1, 3}), step));
      std::map<int, std::vector<ExecutionRecord>> records;
      for (const CallPtr& call : calls) {
        REQUIRE(call->finished()->wait_for(300000));
        REQUIRE_FALSE(call->failed());
        CHECK(call->records().size() == 3 * kMicrobatches);
        for (const ExecutionRecord& record : call->records()) records[record.device].push_back(record);
      }
      for (auto& [device, of_device] : records) {
        std::ranges::sort(of_device, {}, &ExecutionRecord::start_ms);
        double reached_ms = 0;
        for (const ExecutionRecord& record : of_device) {
          CHECK(record.start_ms >= reached_ms);
          reached_ms = record.end_ms;
          CHECK(record.end_ms - record.start_ms - record.waited_ms >= least_ms(record) - kRounding_ms);
          if (record.phase != Phase::kBackward) continue;
          CHECK(record.recomputed_ms - record.start_ms >= kForward_ms - kRounding_ms);
          CHECK(record.waited_ms >= 0);
          CHECK(record.recomputed_ms + record.waited_ms + kBackward_ms <= record.end_ms + kRounding_ms);
        }
      }
      CostMeter meter(*pool.model);
      for (const CallPtr& call : calls) meter.add(call->records(), call->log->layer_times());
      for (const auto& cost : meter.costs()) {
        CHECK(cost.forward_ms >= kForward_ms - kRounding_ms);
        CHECK(cost.backward_ms >= kBackward_ms - kRounding_ms);
      }
    }
  }

  TEST_CASE("tell the layers of a stage apart") {
    constexpr double kMost_ms = 200;
    for (const int slowest : {0, 1, 2}) {
      std::vector<std::unique_ptr<Layer>> layers;
      for (int l = 0; l < kLayers; ++l) {
        layers.push_back(std::make_unique<NativeLayer>(slow_layer("l", l == slowest ? kMost_ms : 1)));
      }
      LatePool pool(1, std::make_shared<ModelState>("model", std::move(layers), /*pinned=*/false));
      std::vector<double> least_ms(kLayers, 1e9);  // of several calls: a busy machine delays a layer now and then
      const auto are_told_apart = [&] {
        const CallPtr call = pool.submit(fused_stages({0, 3}), 0);
        REQUIRE(call->finished()->wait_for(300000));
        REQUIRE_FALSE(call->failed());
        CostMeter meter(*pool.model);
        meter.add(call->records(), call->log->layer_times());
        bool fast = true;
        for (int l = 0; l < kLayers; ++l) {
          double& ms = least_ms[static_cast<size_t>(l)];
          ms = std::min(ms, meter.costs()[static_cast<size_t>(l)].backward_ms);
          fast &= l == slowest || ms < kMost_ms / 2;
        }
        return fast;
      };
      for (int calls = 1; !are_told_apart(); ++calls) REQUIRE(calls < 20);
      CHECK(least_ms[static_cast<size_t>(slowest)] >= kMost_ms - kRounding_ms);
    }
  }
}

}  // namespace execution_records_test
