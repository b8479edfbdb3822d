#include <roundpipe/runtime/worker.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/runtime/shells.h>
#include <roundpipe/runtime/submission.h>

#include "support/model.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;
using roundpipe::schedule::Plan;
using roundpipe::schedule::PlanMode;

namespace {

constexpr int64_t kWidth = 4;
constexpr double kPatience_ms = 300000;  // ends what hangs

std::shared_ptr<ModelState> make_model(const std::vector<LayerSpec>& layers) {
  std::vector<std::unique_ptr<Layer>> made;
  for (const LayerSpec& spec : layers) made.push_back(std::make_unique<NativeLayer>(spec));
  return std::make_shared<ModelState>("model", std::move(made), /*pinned=*/false);
}

// A forward of one batch of ones, submitted and not waited for.
CallPtr submit_forward(const std::shared_ptr<ModelState>& model, Engine& engine, roundpipe::schedule::Stages stages,
                       int microbatches) {
  static std::atomic<uint64_t> next_id{1000};
  CallOptions options;
  options.microbatches = microbatches;
  options.requires_grad = false;
  auto call = std::make_shared<Call>(model, options, next_id++, 0, 0);
  call->thread_state.emplace();
  call->autocast = AutocastState::capture(engine.device_type());
  call->trainable = model->trainable();
  for (const BlockState& block : model->blocks) call->readings.push_back(block.block->current());
  ModelPlanner planner(*call->model);
  const Plan plan = plan_call(*call, std::move(stages), PlanMode::kInference, true, planner, engine);
  open_boundaries(*call, plan);
  for (int m = 0; m < microbatches; ++m) {
    put_inputs(*call, m, {{at::ones({1, kWidth}), at::ones({1, 1})}, nullptr}, /*copy=*/true, /*pinned=*/false);
  }
  submit_jobs(call, plan, /*forward=*/true, /*backward=*/false, engine);
  return call;
}

roundpipe::schedule::Stages stages_of(std::initializer_list<int> cuts) {
  roundpipe::schedule::Stages stages;
  stages.forward = ascending(cuts);
  return stages;
}

// Lets layers pass one by one.
class Gate {
 public:
  void open(int count) {
    std::lock_guard lock(mutex_);
    open_ += count;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_ > 0; });
    --open_;
  }
  bool arrived(int count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(300), [&] { return arrived_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int open_ = 0;
  int arrived_ = 0;
};

LayerSpec gated(LayerSpec layer, std::shared_ptr<Gate> gate) {
  layer.body = [gate, body = layer.body](Tensors inputs, const Tensors& parameters, const Tensors& buffers,
                                         const LayerContext& context) {
    gate->pass();
    return body(std::move(inputs), parameters, buffers, context);
  };
  return layer;
}

}  // namespace

TEST_SUITE("worker") {
  TEST_CASE("an engine that is dropped finishes what it was given") {
    std::vector<LayerSpec> layers;
    for (int l = 0; l < 4; ++l) layers.push_back(linear_layer("l", kWidth));
    const auto model = make_model(layers);
    for (int round = 0; round < 5; ++round) {
      std::vector<CallPtr> calls;
      {
        Engine engine(roundpipe::device::parse_devices("virtual:3,debug"));
        for (int i = 0; i < 4; ++i) calls.push_back(submit_forward(model, engine, stages_of({0, 1, 2, 4}), 3));
      }
      PlainModel plain("model", layers);
      const at::Tensor expected = plain.forward({at::ones({1, kWidth}), at::ones({1, 1})}, 0, 0)[0];
      for (const CallPtr& call : calls) {
        CHECK(call->finished()->complete());
        CHECK_FALSE(call->failed());
        for (int m = 0; m < 3; ++m) CHECK(same_bits(call->values(4, m).tensors[0]->data, expected));
      }
    }
  }

  TEST_CASE("the next job's weights are uploaded while one runs, and no more than two are held") {
    const auto gate = std::make_shared<Gate>();
    std::vector<LayerSpec> layers;
    for (int l = 0; l < 4; ++l) layers.push_back(gated(linear_layer("l", kWidth), gate));
    const auto model = make_model(layers);
    Engine engine(roundpipe::device::parse_devices("virtual:1"));
    int64_t stage_bytes = 0;
    const CallPtr call = submit_forward(model, engine, stages_of({0, 1, 2, 3, 4}), 1);
    REQUIRE(gate->arrived(1));
    // The input is two tensors; everything else that has gone up is weights.
    stage_bytes = model->blocks[0].block->layout().size_bytes;
    const int64_t input_bytes = (kWidth + 1) * 4;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(300);
    while (engine.worker(0).upload().moved_bytes() < 2 * stage_bytes + input_bytes &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(engine.worker(0).upload().moved_bytes() == 2 * stage_bytes + input_bytes);
    gate->open(4);
    CHECK(call->finished()->wait_for(kPatience_ms));
    CHECK(call->records().size() == 4);
  }

  TEST_CASE("a call that fails is over only when nothing touches its memory any more") {
    // Uploads of 10 ms each, given up while the first one is under way.
    std::vector<LayerSpec> layers;
    for (int l = 0; l < 3; ++l) layers.push_back(linear_layer("l", 250));
    const auto model = make_model(layers);
    for (int round = 0; round < 5; ++round) {
      Engine engine(roundpipe::device::parse_devices("virtual:2,link=0.025GB/s,debug"));
      const CallPtr call = submit_forward(model, engine, stages_of({0, 1, 2, 3}), 1);
      std::this_thread::sleep_for(std::chrono::milliseconds(2 * round));
      call->fail(std::make_exception_ptr(InjectedFault("given up")));
      REQUIRE(call->finished()->wait_for(kPatience_ms));
      // Would be a race if an upload still read it.
      const at::NoGradGuard no_grad;
      for (const LayerSpec& layer : layers) layer.parameters[0].tensor.detach().mul_(1.0);
    }
  }

  TEST_CASE("an engine that has been shut down refuses, and the call is over") {
    const auto model = make_model({linear_layer("l", kWidth)});
    const auto engine = use_devices("virtual:1");
    CHECK(submit_forward(model, *engine, stages_of({0, 1}), 1)->finished()->wait_for(kPatience_ms));
    CallOptions options;
    auto call = std::make_shared<Call>(model, options, 1, 0, 0);
    call->trainable = model->trainable();
    call->readings.push_back(model->blocks[0].block->current());
    ModelPlanner planner(*call->model);
    const Plan plan = plan_call(*call, stages_of({0, 1}), PlanMode::kInference, true, planner, *engine);
    open_boundaries(*call, plan);
    Engine::shut_down();
    CHECK_THROWS_AS(submit_jobs(call, plan, true, false, *engine), roundpipe::Error);
    CHECK(call->finished()->complete());
    CHECK(call->failed());
  }

  TEST_CASE("submissions from several threads do not wait for each other in a circle") {
    std::vector<LayerSpec> layers;
    for (int l = 0; l < 3; ++l) layers.push_back(linear_layer("l", kWidth));
    Engine engine(roundpipe::device::parse_devices("virtual:3"));
    std::vector<std::thread> users;
    std::atomic<int> finished{0};
    for (int user = 0; user < 3; ++user) {
      users.emplace_back([&] {
        const auto model = make_model(layers);
        for (int i = 0; i < 20; ++i) {
          if (submit_forward(model, engine, stages_of({0, 1, 2, 3}), 2)->finished()->wait_for(kPatience_ms)) ++finished;
        }
        engine.forget(*model);
      });
    }
    for (std::thread& user : users) user.join();
    CHECK(finished.load() == 60);
  }
}

TEST_SUITE("shells") {
  TEST_CASE("a shell is made once, refreshed once a call, and gone when the model is forgotten") {
    const auto model = make_model({linear_layer("a", kWidth), linear_layer("b", kWidth)});
    const auto other = make_model({linear_layer("c", kWidth)});
    const c10::Device host(c10::DeviceType::CPU);
    ShellCounts& counts = shell_counts();
    const int made = counts.made, alive = counts.alive, refreshed = counts.refreshed;
    Shells shells;
    Shell& first = shells.get(*model, 0, host, /*call=*/1);
    CHECK(&shells.get(*model, 0, host, 1) == &first);
    CHECK(&shells.get(*model, 1, host, 1) != &first);
    shells.get(*other, 0, host, 1);
    CHECK(counts.made == made + 3);
    CHECK(counts.refreshed == refreshed + 3);
    CHECK(&shells.get(*model, 0, host, 2) == &first);
    CHECK(counts.refreshed == refreshed + 4);
    shells.forget(*model);
    shells.forget(*model);
    CHECK(counts.alive == alive + 1);
    shells.forget(*other);
    CHECK(counts.alive == alive);
  }

  TEST_CASE("a sink takes gradients where they are to go and leaves none on the leaf") {
    const auto model = make_model({linear_layer("a", 2)});
    Shells shells;
    Shell& shell = shells.get(*model, 0, c10::Device(c10::DeviceType::CPU), 1);
    at::Tensor weight = shell.layer->parameters[0];
    weight.set_data(at::ones({2, 2}));
    weight.set_requires_grad(true);
    shell.sink.reset(2);
    const at::Tensor target = at::full({2, 2}, 100.0);
    shell.sink.targets[0] = target;
    for (const double expected : {3.0, 6.0}) {
      torch::autograd::backward({(weight * 3).sum()}, {});
      CHECK(target.equal(at::full({2, 2}, expected)));
      CHECK_FALSE(weight.grad().defined());
    }
    // Without a target it is kept for whoever shares the parameter.
    shell.sink.reset(2);
    torch::autograd::backward({(weight * 5).sum()}, {});
    CHECK(shell.sink.tied[0].equal(at::full({2, 2}, 5.0)));
  }
}
