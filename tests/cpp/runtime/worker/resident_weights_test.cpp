#include <roundpipe/runtime/worker/resident_weights.h>

#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/device/make_devices.h>
#include <roundpipe/runtime/engine.h>
#include <roundpipe/runtime/submission.h>

#include "support/model.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;
using roundpipe::schedule::Plan;
using roundpipe::schedule::PlanMode;

namespace resident_weights_test {

constexpr int64_t kWidth = 64;
constexpr int64_t kBlock_bytes = 4 * (kWidth * kWidth + kWidth);  // of a layer
constexpr int kLayers = 4;

// A chain of linear layers, of which none is trained, on one device.
class Frozen {
 public:
  explicit Frozen(const std::string& options, int frozen_layers = kLayers)
      : engine(roundpipe::device::parse_devices("virtual:1,debug" + options)) {
    at::manual_seed(4);
    for (int l = 0; l < kLayers; ++l) {
      layers.push_back(linear_layer("layer" + std::to_string(l), kWidth));
      layers.back().body = [this, l, body = layers.back().body](Tensors inputs, const Tensors& parameters,
                                                                const Tensors& buffers, const LayerContext& context) {
        if (before) before(l, parameters);
        return body(std::move(inputs), parameters, buffers, context);
      };
      for (const auto& parameter : layers.back().parameters) {
        at::Tensor tensor = parameter.tensor;
        tensor.set_requires_grad(l >= frozen_layers);
      }
    }
    std::vector<std::unique_ptr<Layer>> owned;
    for (const LayerSpec& layer : layers) owned.push_back(std::make_unique<NativeLayer>(layer));
    model = std::make_shared<ModelState>("frozen", std::move(owned), false);
  }
  ~Frozen() { engine.wait_idle(); }

  // Submits a forward, layer by layer, and waits for it.
  CallPtr forward() {
    static std::atomic<uint64_t> next_id{5000};
    RunOptions options;
    options.requires_grad = false;
    roundpipe::schedule::Stages stages;
    for (int l = 0; l < kLayers; ++l) stages.forward.push_back({l, l + 1});
    options.route = std::move(stages);
    auto call = std::make_shared<Call>(model, options, CallTerms(), next_id++, 0, 0);
    call->position = ++position;
    call->keep_outputs = true;
    call->habits = model->habits_of_now();
    call->thread_state.emplace();
    call->autocast = AutocastState::capture(engine.device_type());
    call->trainable = model->trainable();
    for (const BlockState& block : model->blocks) call->readings.push_back(block.block->current());
    ModelPlanner planner(*model);
    const Plan plan = plan_call(*call, PlanMode::kInference, planner, engine);
    open_boundaries(*call, plan);
    put_inputs(*call, 0, {{at::ones({1, kWidth}), at::ones({1, 1})}, nullptr}, /*copy=*/true, /*pinned=*/false);
    submit_jobs(call, plan, /*forward=*/true, /*backward=*/false, engine);
    call->finished()->wait_complete();
    engine.wait_idle();
    return call;
  }

  // Bytes of weights that a forward uploads.
  int64_t uploaded() {
    const auto moved = [&] { return engine.worker(0).upload().use(roundpipe::transfer::Priority::kWeight).bytes; };
    const int64_t before = moved();
    const CallPtr call = forward();
    CHECK_FALSE(call->error());
    return moved() - before;
  }
  int64_t resident() { return engine.worker(0).resident_bytes(); }
  at::Tensor weight(int layer) { return layers[static_cast<size_t>(layer)].parameters[0].tensor; }

  std::function<void(int layer, const Tensors& parameters)> before;  // called by layers; set while none runs
  std::vector<LayerSpec> layers;
  Engine engine;
  std::shared_ptr<ModelState> model;
  uint64_t position = 0;
};

}  // namespace resident_weights_test

using namespace resident_weights_test;

TEST_CASE("resident weights: without a cap, every visit uploads") {
  Frozen frozen("");
  for (int call = 0; call < 3; ++call) CHECK(frozen.uploaded() == kLayers * kBlock_bytes);
  CHECK(frozen.resident() == 0);
}

TEST_CASE("resident weights: with room, from the second forward on a block is uploaded once") {
  Frozen frozen(",memory=4MiB");
  CHECK(frozen.uploaded() == kLayers * kBlock_bytes);
  CHECK(frozen.resident() == 0);
  CHECK(frozen.uploaded() == kLayers * kBlock_bytes);
  CHECK(frozen.resident() == kLayers * kBlock_bytes);
  for (int call = 0; call < 3; ++call) CHECK(frozen.uploaded() == 0);
}

TEST_CASE("resident weights: at once where the work's memory is known") {
  Frozen frozen(",memory=4MiB");
  frozen.model->work_bytes.store(4096);
  CHECK(frozen.uploaded() == kLayers * kBlock_bytes);
  CHECK(frozen.uploaded() == 0);
}

TEST_CASE("resident weights: blocks that train are uploaded at each visit") {
  Frozen frozen(",memory=4MiB", 1);
  for (int call = 0; call < 2; ++call) frozen.uploaded();
  CHECK(frozen.resident() == kBlock_bytes);
  CHECK(frozen.uploaded() == (kLayers - 1) * kBlock_bytes);
}

TEST_CASE("resident weights: one bit that changes on the host, without a trace in versions, is uploaded") {
  Frozen frozen(",memory=4MiB");
  for (int call = 0; call < 2; ++call) frozen.uploaded();
  for (const int64_t place : {int64_t{0}, int64_t{17}, kWidth * kWidth - 1}) {
    auto* words = static_cast<int32_t*>(frozen.weight(2).data_ptr());
    words[place] ^= 1;
    CHECK(frozen.uploaded() == kBlock_bytes);
    CHECK(frozen.uploaded() == 0);
  }
}

TEST_CASE("resident weights: of a block with room for some, the same ones stay") {
  // 0.4 of the cap is left to activations, and two slots take two blocks.
  Frozen frozen(",memory=120KiB");
  for (int call = 0; call < 2; ++call) frozen.uploaded();
  const int64_t stay = frozen.resident() / kBlock_bytes;
  CHECK(stay > 0);
  CHECK(stay < kLayers);
  for (int call = 0; call < 3; ++call) CHECK(frozen.uploaded() == (kLayers - stay) * kBlock_bytes);
}

TEST_CASE("resident weights: copies go with their model, and when the device's memory is trimmed") {
  Frozen frozen(",memory=4MiB");
  for (int call = 0; call < 2; ++call) frozen.uploaded();
  frozen.engine.worker(0).trim();
  CHECK(frozen.resident() == 0);
  CHECK(frozen.uploaded() == kLayers * kBlock_bytes);
  const int64_t held = frozen.engine.worker(0).device().memory().current_bytes;
  const std::weak_ptr<ModelState> model = frozen.model;
  frozen.model.reset();
  while (!model.expired()) std::this_thread::yield();  // a thread may still be letting go of the last job
  CHECK(frozen.resident() == 0);
  CHECK(frozen.engine.worker(0).device().memory().current_bytes <= held - kLayers * kBlock_bytes);
}

TEST_CASE("resident weights: a layer that asks for their memory gets it, and fewer stay from then on") {
  Frozen frozen(",memory=256KiB");
  for (int call = 0; call < 2; ++call) frozen.uploaded();
  const int64_t all = frozen.resident();
  REQUIRE(all == kLayers * kBlock_bytes);
  // More than is free beside the copies of all layers.
  frozen.before = [](int layer, const Tensors&) {
    if (layer == 0) at::empty({200 * 1024}, at::kByte);
  };
  const CallPtr call = frozen.forward();
  CHECK_FALSE(call->error());
  frozen.before = nullptr;
  frozen.uploaded();
  CHECK(frozen.resident() <= all / 2);
}

TEST_CASE("resident weights: a job that failed may have written to its copies, which are uploaded again") {
  Frozen frozen(",memory=4MiB");
  for (int call = 0; call < 2; ++call) frozen.uploaded();
  frozen.before = [](int layer, const Tensors& parameters) {
    if (layer != 1) return;
    at::Tensor(parameters[0]).data().mul_(2);
    throw std::runtime_error("on purpose");
  };
  CHECK(frozen.forward()->error());
  frozen.before = nullptr;
  CHECK(frozen.uploaded() >= kBlock_bytes);
  CHECK(frozen.uploaded() == 0);
}
