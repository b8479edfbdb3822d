#include <roundpipe/runtime/worker/worker.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/device/make_devices.h>
#include <roundpipe/runtime/submission.h>

#include "support/model.h"
#include "support/observed_device.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;
using roundpipe::device::EventPtr;
using roundpipe::schedule::Plan;
using roundpipe::schedule::PlanMode;

namespace worker_test {

constexpr int64_t kWidth = 4;
constexpr double kPatience_ms = 300000;  // ends a test that hangs

// Submits a forward of one batch of ones, and does not wait for it.
CallPtr submit_forward(const std::shared_ptr<ModelState>& model, Engine& engine, roundpipe::schedule::Stages stages,
                       int microbatches, int64_t width = kWidth) {
  static std::atomic<uint64_t> next_id{1000};
  RunOptions options;
  options.microbatches = microbatches;
  options.requires_grad = false;
  options.route = std::move(stages);
  auto call = std::make_shared<Call>(model, options, CallTerms(), next_id++, 0, 0);
  call->habits = model->habits_of_now();
  call->thread_state.emplace();
  call->autocast = AutocastState::capture(engine.device_type());
  call->trainable = model->trainable();
  for (const BlockState& block : model->blocks) call->readings.push_back(block.block->current());
  ModelPlanner planner(*call->model);
  const Plan plan = plan_call(*call, PlanMode::kInference, planner, engine);
  open_boundaries(*call, plan);
  for (int m = 0; m < microbatches; ++m) {
    put_inputs(*call, m, {{at::ones({1, width}), at::ones({1, 1})}, nullptr}, /*copy=*/true, /*pinned=*/false);
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

// Two layers on one device. The first needs memory that the second one's prefetched weights hold by then.
struct Parking {
  static constexpr int64_t kWide = 256;  // weights of 257 KiB a layer
  static constexpr int64_t kHunger_bytes = 800 * 1024;

  explicit Parking(const std::string& options = "") {
    at::manual_seed(3);
    for (const char* name : {"hungry", "next"}) layers.push_back(linear_layer(name, kWide));
    layers[0].body = [this, body = layers[0].body](Tensors inputs, const Tensors& parameters, const Tensors& buffers,
                                                   const LayerContext& context) {
      const int64_t both_bytes = 2 * model->blocks[0].block->layout().size_bytes;
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(300);
      while (worker->upload().moved_bytes() < both_bytes && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      ++tried;
      const at::Tensor hunger = at::empty({kHunger_bytes}, at::kByte);
      return body(std::move(inputs), parameters, buffers, context);
    };
    model = make_model(layers);
    const auto specs = roundpipe::device::parse_devices("virtual:1,memory=1200KiB" + options);
    std::vector<std::unique_ptr<roundpipe::device::Device>> devices;
    for (auto& device : roundpipe::device::make_devices(specs)) {
      devices.push_back(std::make_unique<ObservedDevice>(specs[0], std::move(device), observer));
    }
    engine = std::make_unique<Engine>(specs, std::move(devices));
    worker = &engine->worker(0);
  }
  ~Parking() { engine.reset(); }

  CallPtr submit() { return submit_forward(model, *engine, stages_of({0, 1, 2}), 1, kWide); }
  bool good(const CallPtr& call) {
    if (!call->finished()->wait_for(kPatience_ms)) return false;
    if (const std::exception_ptr error = call->error()) {
      try {
        std::rethrow_exception(error);
      } catch (const std::exception& raised) {
        MESSAGE(std::string(raised.what()));
      }
      return false;
    }
    at::Tensor value = at::ones({1, kWide});
    for (const LayerSpec& layer : layers) {
      const Tensors weights{layer.parameters[0].tensor, layer.parameters[1].tensor};
      value = at::linear(at::tanh(value), weights[0], weights[1]);
    }
    return same_bits(call->values(2, 0).tensors[0]->data, value.detach());
  }
  // Whether another thread can take the worker's lock now.
  bool lock_is_free() {
    auto locked = std::make_shared<std::promise<void>>();
    std::thread([locked, mine = worker] {
      {
        const roundpipe::MutexLock lock(mine->queue().mutex());
      }
      locked->set_value();
    }).detach();
    return locked->get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  }

  QueueObserver observer;
  std::vector<LayerSpec> layers;
  std::atomic<int> tried{0};
  std::shared_ptr<ModelState> model;
  std::unique_ptr<Engine> engine;
  Worker* worker = nullptr;
};

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
    // The input is two tensors; all other uploaded bytes are weights.
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

  TEST_CASE("weights are allocated once, however much the stages differ, and once more for a plan of larger ones") {
    constexpr int64_t kLeast_bytes = 64 << 10;
    std::vector<LayerSpec> layers;
    constexpr int64_t kModel_bytes = (300 + 64 + 128 + 500 + 90 + 700) << 10;
    for (const int64_t kib : {300, 64, 128, 500, 90, 700}) {
      LayerSpec layer = linear_layer("l", kWidth);
      layer.parameters.push_back({"ballast", at::zeros({kib << 8})});
      layers.push_back(std::move(layer));
    }
    const auto model = make_model(layers);
    for (const int devices : {1, 2}) {
      Engine engine(roundpipe::device::parse_devices("virtual:" + std::to_string(devices)));
      const auto allocated_by = [&](const std::function<void()>& work) {
        std::vector<int64_t> bytes;
        for (int d = 0; d < devices; ++d) bytes.push_back(-engine.worker(d).device().memory().allocated_bytes);
        work();
        for (int d = 0; d < devices; ++d) bytes[d] += engine.worker(d).device().memory().allocated_bytes;
        return *std::ranges::max_element(bytes);
      };
      const auto run = [&](const std::initializer_list<int>& cuts) {
        std::vector<CallPtr> calls;
        for (int i = 0; i < 4; ++i) calls.push_back(submit_forward(model, engine, stages_of(cuts), 2));
        for (const CallPtr& call : calls) REQUIRE(call->finished()->wait_for(kPatience_ms));
      };
      const std::initializer_list<int> fine{0, 1, 2, 3, 4, 5, 6}, coarse{0, 3, 6};
      run(fine);
      CHECK(allocated_by([&] { run(fine); }) < kLeast_bytes);
      // An arena for two of the larger stages; a new arena for each call would take the bytes of all weights.
      CHECK(allocated_by([&] { run(coarse); }) < 2 * kModel_bytes + kLeast_bytes);
      CHECK(allocated_by([&] { run(coarse); }) < kLeast_bytes);
      CHECK(allocated_by([&] { run(fine); }) < kLeast_bytes);
    }
  }

  TEST_CASE("a call that fails is over only when nothing touches its memory any more") {
    // Uploads of 10 ms each; the call fails while the first one runs.
    std::vector<LayerSpec> layers;
    for (int l = 0; l < 3; ++l) layers.push_back(linear_layer("l", 250));
    const auto model = make_model(layers);
    for (int round = 0; round < 5; ++round) {
      Engine engine(roundpipe::device::parse_devices("virtual:2,link=0.025GB/s,debug"));
      const CallPtr call = submit_forward(model, engine, stages_of({0, 1, 2, 3}), 1);
      std::this_thread::sleep_for(std::chrono::milliseconds(2 * round));
      call->fail(std::make_exception_ptr(InjectedFault("given up")));
      REQUIRE(call->finished()->wait_for(kPatience_ms));
      // A race if an upload still read it.
      const at::NoGradGuard no_grad;
      for (const LayerSpec& layer : layers) layer.parameters[0].tensor.detach().mul_(1.0);
    }
  }

  TEST_CASE("an engine that has been shut down refuses, and the call is over") {
    // The engine ends for good, so this runs in a process of its own.
    if (std::getenv("ROUNDPIPE_TEST_ENDS") == nullptr) {
      CHECK(std::system("ROUNDPIPE_TEST_ENDS=1 /proc/$PPID/exe -tc='an engine that has been shut down*'") == 0);
      return;
    }
    const auto model = make_model({linear_layer("l", kWidth)});
    const auto engine = use_devices("virtual:1");
    CHECK(submit_forward(model, *engine, stages_of({0, 1}), 1)->finished()->wait_for(kPatience_ms));
    auto call = std::make_shared<Call>(model, along(stages_of({0, 1})), CallTerms(), 1, 0, 0);
    call->habits = model->habits_of_now();
    call->trainable = model->trainable();
    call->readings.push_back(model->blocks[0].block->current());
    ModelPlanner planner(*call->model);
    const Plan plan = plan_call(*call, PlanMode::kInference, planner, *engine);
    open_boundaries(*call, plan);
    Engine::shut_down();
    CHECK_THROWS_AS(engine->worker(0), roundpipe::Error);
    CHECK_THROWS_AS(Engine::current(), roundpipe::Error);
    CHECK_THROWS_AS(use_devices("virtual:1"), roundpipe::Error);
    CHECK_THROWS_AS(submit_jobs(call, plan, true, false, *engine), roundpipe::Error);
    CHECK(call->finished()->complete());
    CHECK(call->failed());
  }

  TEST_CASE("parking the next job's weights: each queue has one thread, and nothing is copied under the lock") {
    Parking setup(",debug");
    std::atomic<int> held{0};
    setup.observer.on_use = [&](const std::string& queue, const std::string& what) {
      const bool moves = what == "copy" || what == "poison" || (queue == "download" && what == "enter");
      if (moves && !setup.lock_is_free()) ++held;
    };
    const CallPtr call = setup.submit();
    CHECK(setup.good(call));
    CHECK(setup.tried.load() == 2);
    CHECK(held.load() == 0);
    for (const char* queue : {"compute", "upload", "download"}) CHECK(setup.observer.threads(queue) == 1);
    // The weights went down and up again, as ordinary transfers.
    const int64_t weights_bytes = setup.model->blocks[1].block->layout().size_bytes;
    CHECK(setup.worker->download().use(roundpipe::transfer::Priority::kWeight).bytes >= weights_bytes);
    CHECK(setup.worker->upload().use(roundpipe::transfer::Priority::kWeight).bytes >= 3 * weights_bytes);
  }

  TEST_CASE("parking in small chunks: the call fails, or is followed by another, in the middle of it") {
    for (const bool fails : {false, true}) {
      Parking setup(",debug,chunk=16KiB");
      std::atomic<int> chunks{0};
      CallPtr call, second;
      std::promise<void> submitted;
      std::shared_future<void> known(submitted.get_future());
      setup.observer.on_use = [&](const std::string& queue, const std::string& what) {
        if (queue != "download" || what != "copy" || ++chunks != 3) return;
        known.wait();
        if (fails) {
          call->fail(std::make_exception_ptr(InjectedFault("in the middle")));
        } else {
          second = setup.submit();
        }
      };
      call = setup.submit();
      submitted.set_value();
      if (fails) {
        REQUIRE(call->finished()->wait_for(kPatience_ms));
        CHECK(call->failed());
        setup.observer.on_use = nullptr;
        second = setup.submit();
      } else {
        CHECK(setup.good(call));
      }
      CHECK(chunks.load() >= 3);
      REQUIRE(second != nullptr);
      CHECK(setup.good(second));
    }
  }

  TEST_CASE("room is made of what lies in the next job's slot before its upload has begun") {
    Parking setup(",debug");
    REQUIRE(setup.good(setup.submit()));
    REQUIRE(setup.tried.load() == 2);
    // Now both slots hold memory. The third visit to the link is for the next job's weights, and is held back until
    // their slot's memory is dropped.
    const int64_t both_bytes = 2 * setup.model->blocks[0].block->layout().size_bytes;
    std::promise<CallPtr> submitted;
    std::shared_future<CallPtr> call(submitted.get_future());
    std::atomic<int> visits{0};
    setup.observer.on_use = [&](const std::string& queue, const std::string& what) {
      if (queue != "upload" || what != "enter" || ++visits != 3) return;
      while (setup.worker->device().memory().current_bytes >= both_bytes && !call.get()->failed()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    };
    submitted.set_value(setup.submit());
    CHECK(setup.good(call.get()));
    CHECK(setup.tried.load() == 4);
  }

  TEST_CASE("an engine that is dropped while the next job is parked finishes what it was given") {
    Parking setup;
    const CallPtr call = setup.submit();
    setup.engine.reset();
    CHECK(setup.good(call));
    CHECK(setup.tried.load() == 2);
  }

  TEST_CASE("a child made by fork while calls run ends, and drops what it likes") {
    for (int round = 0; round < 20; ++round) {
      std::vector<LayerSpec> layers;
      for (int l = 0; l < 4; ++l) layers.push_back(linear_layer("l", kWidth));
      auto piped = std::make_unique<PipedModel>("m", layers, /*fused=*/true);
      auto engine = use_devices("virtual:2");
      const Batch batch = make_batch(3, 2, kWidth);
      for (int step = 0; step < 2; ++step) {
        piped->pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(), false,
                                           along(fused_stages({0, 2, 4})));
        piped->step(0.1, true);
      }
      const pid_t child = fork();
      if (child == 0) {
        const auto refuses = [](const std::function<void()>& use) {
          try {
            use();
          } catch (const roundpipe::Error&) {
            return true;
          }
          return false;
        };
        const bool refused = refuses([&] { piped->synchronize(); }) && refuses([&] { piped->step(0.1, true); }) &&
                             refuses([] { Engine::current(); }) && refuses([&] { engine->worker(0); });
        piped.reset();
        engine.reset();
        Engine::shut_down();
        _exit(refused ? 0 : 1);
      }
      int status = -1;
      waitpid(child, &status, 0);
      CHECK(status == 0);
      piped->synchronize();
    }
  }

  TEST_CASE("what hangs behind an event of a call fails the call when it throws, or when the event has failed") {
    const auto model = make_model({linear_layer("l", kWidth)});
    for (const bool throws : {true, false}) {
      const auto call = std::make_shared<Call>(model, RunOptions(), CallTerms(), 1, 0, 0);
      call->habits = model->habits_of_now();
      const EventPtr waits = call->new_event();
      const EventPtr first = roundpipe::device::make_event(), second = roundpipe::device::make_event();
      int ran = 0;
      call->then({first, nullptr, second}, [&] {
        ++ran;
        if (throws) throw InjectedFault("no room");
      });
      first->fire();
      CHECK_FALSE(call->failed());
      if (throws) {
        second->fire();
      } else {
        second->fail(std::make_exception_ptr(InjectedFault("no room")));
      }
      CHECK(ran == (throws ? 1 : 0));
      CHECK_THROWS_AS(waits->wait(), InjectedFault);
    }
    CHECK(roundpipe::device::escaped_error() == nullptr);
  }

  TEST_CASE("submissions from several threads do not wait for each other in a circle") {
    Engine engine(roundpipe::device::parse_devices("virtual:3"));
    std::vector<std::thread> users;
    std::atomic<int> finished{0};
    for (int user = 0; user < 3; ++user) {
      users.emplace_back([&] {
        std::vector<LayerSpec> layers;
        for (int l = 0; l < 3; ++l) layers.push_back(linear_layer("l", kWidth));
        const auto model = make_model(layers);
        for (int i = 0; i < 20; ++i) {
          if (submit_forward(model, engine, stages_of({0, 1, 2, 3}), 2)->finished()->wait_for(kPatience_ms)) ++finished;
        }
      });
    }
    for (std::thread& user : users) user.join();
    CHECK(finished.load() == 60);
  }
}

}  // namespace worker_test
