#include <roundpipe/roundpipe.h>

#include <deque>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <thread>

#include <doctest/doctest.h>

#include "support/chain.h"

using namespace roundpipe;
using namespace roundpipe::support;

namespace {

// A model that trains on its own thread. The plain loop, which draws from the process's generator, follows later.
class Trainee {
 public:
  explicit Trainee(int number)
      : number_(number), duel_(/*asynchronous=*/number % 2 == 0, {.name = concat("trainee ", number)}) {}

  void train() {
    for (uint64_t step = 0; step < kSteps; ++step) {
      for (uint64_t part = 0; part < 2; ++part) {
        const Sample batch = sample_of(2 * step + part);
        losses_.push_back(number_ % 3 == 0
                              ? duel_.model.submit(batch.inputs, batch.labels, squared_error).finish().loss
                              : duel_.model.forward_backward(batch.inputs, batch.labels, squared_error).loss);
      }
      if (!duel_.sgd) duel_.sgd = std::make_unique<Optimizer>(duel_.model, PlainTraining::rule());
      duel_.model.step(*duel_.sgd, {.asynchronous = duel_.is_asynchronous});
    }
    duel_.model.synchronize();
  }
  bool is_as_plain() {
    std::vector<Tensor> expected;
    for (uint64_t step = 0; step < kSteps; ++step) {
      for (uint64_t part = 0; part < 2; ++part) {
        const uint64_t call = 2 * step + part;
        expected.push_back(duel_.plain.call(duel_.model, call, sample_of(call), 3));
      }
      duel_.plain.step();
    }
    return alike(losses_, expected) && alike(duel_.state(), duel_.plain.state());
  }

 private:
  static constexpr uint64_t kSteps = 5;
  Sample sample_of(uint64_t call) const { return sample(100 * static_cast<uint64_t>(number_) + call); }

  int number_;
  Duel duel_;
  std::vector<Tensor> losses_;
};

}  // namespace

TEST_SUITE("stress") {
  TEST_CASE("models of many threads share the devices, and each has the plain loop's bits") {
    for (const int count : {1, 3}) {
      set_devices(concat("virtual:", count, ",debug"));
      at::manual_seed(1);
      std::vector<std::unique_ptr<Trainee>> trainees;
      for (int number = 0; number < 6; ++number) trainees.push_back(std::make_unique<Trainee>(number));
      std::vector<std::thread> threads;
      for (const auto& trainee : trainees) threads.emplace_back([&] { trainee->train(); });
      for (std::thread& thread : threads) thread.join();
      for (const auto& trainee : trainees) CHECK(trainee->is_as_plain());
    }
  }

  TEST_CASE("one model is handed from thread to thread") {
    set_devices("virtual:2");
    at::manual_seed(2);
    Duel duel(/*asynchronous=*/true);
    for (uint64_t number = 0; number < 6; ++number) {
      std::async(std::launch::async, [&] {
        CHECK(duel.call(number));
        duel.step();
      }).get();
    }
    CHECK(duel.goes_on());
  }

  TEST_CASE("devices are looked at, reset and restored while models train on them") {
    set_devices("virtual:3,memory=64MiB");
    at::manual_seed(3);
    std::vector<std::unique_ptr<Trainee>> trainees;
    for (int number = 0; number < 3; ++number) trainees.push_back(std::make_unique<Trainee>(number));
    std::atomic<bool> over{false};
    std::thread looks([&] {
      while (!over.load()) {
        for (const DeviceInfo& device : devices()) CHECK(device.used_bytes <= device.limit_bytes);
        reset_peak_memory();
        CHECK(restore_devices().empty());
      }
    });
    std::vector<std::thread> threads;
    for (const auto& trainee : trainees) threads.emplace_back([&] { trainee->train(); });
    for (std::thread& thread : threads) thread.join();
    over.store(true);
    looks.join();
    for (const auto& trainee : trainees) CHECK(trainee->is_as_plain());
  }

  TEST_CASE("batches of two models are submitted in turn") {
    set_devices("virtual:2,debug");
    at::manual_seed(4);
    Duel one(true, {.name = "one"}), two(true, {.name = "two"});
    std::deque<Model::Pending> pending;
    std::vector<Tensor> losses, expected;
    for (uint64_t number = 0; number < 6; ++number) {
      for (Duel* duel : {&one, &two}) {
        const Sample batch = sample(number);
        const uint64_t call = duel->model.calls();
        pending.push_back(duel->model.submit(batch.inputs, batch.labels, squared_error));
        expected.push_back(duel->plain.call(duel->model, call, batch, 3));
      }
      one.step();
      two.step();
      while (pending.size() > 2) {
        losses.push_back(pending.front().finish().loss);
        pending.pop_front();
      }
    }
    for (Model::Pending& each : pending) losses.push_back(each.finish().loss);
    CHECK(alike(losses, expected));
    CHECK(alike(one.state(), one.plain.state()));
    CHECK(alike(two.state(), two.plain.state()));
  }
}

TEST_SUITE("what is dropped at a wrong moment") {
  TEST_CASE("a model with batches submitted; their losses are still to be had") {
    for (const int count : {1, 2}) {
      set_devices(concat("virtual:", count, ",debug"));
      at::manual_seed(5);
      auto duel = std::make_unique<Duel>();
      std::vector<Tensor> expected;
      std::vector<Model::Pending> pending;
      for (uint64_t number = 0; number < 3; ++number) {
        const Sample batch = sample(number);
        pending.push_back(duel->model.submit(batch.inputs, batch.labels, squared_error));
        expected.push_back(duel->plain.call(duel->model, number, batch, 3));
      }
      duel.reset();
      for (size_t i = 0; i < pending.size(); ++i) CHECK(same_bits(pending[i].finish().loss, expected[i]));
    }
  }

  TEST_CASE("a model whose outputs live; their backward still runs") {
    set_devices("virtual:2,debug");
    at::manual_seed(6);
    Chain chain;
    const Sample batch = sample(0);
    const Tensor inputs = batch.inputs.clone().set_requires_grad(true);
    Tensor outputs, expected;
    {
      Model model(chain.layers());
      model.run_options().microbatches = 1;
      const Chain twin = chain.twin();
      const Tensor own = batch.inputs.clone().set_requires_grad(true);
      Tensor hidden = own;
      int l = 0;
      for (const auto& body : twin.bodies()) {
        seed_for(model, 0, 0, l++);
        hidden = body(hidden);
      }
      hidden.square().sum().backward();
      expected = own.grad();
      outputs = model.forward(inputs);
    }
    outputs.square().sum().backward();
    CHECK(same_bits(inputs.grad(), expected));
  }

  TEST_CASE("a model and its optimizer, with steps in progress: they are made") {
    for (const bool asynchronous : {false, true}) {
      set_devices("virtual:2,debug");
      at::manual_seed(7);
      auto duel = std::make_unique<Duel>(asynchronous);
      const Chain chain = duel->chain;
      std::optional<Step> last;
      for (uint64_t number = 0; number < 3; ++number) {
        duel->call(number);
        if (!duel->sgd) duel->sgd = std::make_unique<Optimizer>(duel->model, PlainTraining::rule());
        last = duel->model.step(*duel->sgd, {.asynchronous = asynchronous, .max_grad_norm = 1e9});
        duel->plain.step();
      }
      std::vector<Tensor> expected = duel->plain.state();
      duel->sgd.reset();
      duel.reset();
      last->wait();
      CHECK(last->grad_norm() > 0);
      CHECK_FALSE(last->skipped());
      std::vector<Tensor> state = copies_of(chain.parameters());
      for (const Tensor& buffer : chain.buffers()) state.push_back(buffer.clone());
      CHECK(alike(state, expected));
    }
  }

  TEST_CASE("an optimizer, for another one") {
    set_devices("virtual:2");
    at::manual_seed(8);
    Duel duel(/*asynchronous=*/true);
    for (int round = 0; round < 3; ++round) {
      CHECK(duel.call(static_cast<uint64_t>(round)));
      duel.step();
      duel.sgd.reset();
      duel.sgd = std::make_unique<Optimizer>(duel.model, PlainTraining::rule());
      duel.model.synchronize();
      duel.plain = PlainTraining(duel.chain, true);
    }
    CHECK(duel.goes_on());
  }

  TEST_CASE("the user's modules") {
    set_devices("virtual:2,debug");
    at::manual_seed(9);
    const Sample batch = sample(0);
    std::optional<Model> model;
    {
      const Chain chain;
      model.emplace(chain.layers());
    }
    Optimizer optimizer(*model, PlainTraining::rule());
    std::vector<double> losses;
    for (int step = 0; step < 4; ++step) {
      losses.push_back(model->forward_backward(batch.inputs, batch.labels, squared_error).loss.item<double>());
      model->step(optimizer, {.asynchronous = false});
    }
    Model moved = std::move(*model);
    model.reset();
    losses.push_back(moved.forward_backward(batch.inputs, batch.labels, squared_error).loss.item<double>());
    moved.step(optimizer);
    moved.synchronize();
    CHECK(losses.back() < losses.front());
  }

  TEST_CASE("devices, between a batch and its result, and between a batch and its step") {
    set_devices("virtual:1");
    at::manual_seed(10);
    Duel duel(/*asynchronous=*/true);
    for (uint64_t number = 0; number < 6; ++number) {
      set_devices(concat("virtual:", 1 + number % 4, number % 2 == 0 ? ",debug" : ""));
      const Sample batch = sample(number);
      const uint64_t call = duel.model.calls();
      auto pending = duel.model.submit(batch.inputs, batch.labels, squared_error);
      set_devices("virtual:2");
      CHECK(alike({pending.finish().loss}, {duel.plain.call(duel.model, call, batch, 3)}));
      set_devices("virtual:3");
      duel.step();
    }
    CHECK(duel.goes_on());
  }

  TEST_CASE("all of it on another thread, while others train") {
    set_devices("virtual:2");
    at::manual_seed(11);
    std::vector<std::unique_ptr<Trainee>> trainees;
    for (int number = 0; number < 2; ++number) trainees.push_back(std::make_unique<Trainee>(number));
    std::vector<std::unique_ptr<Duel>> short_lived;
    for (int number = 0; number < 8; ++number)
      short_lived.push_back(std::make_unique<Duel>(true, ModelOptions{.name = concat("short-lived ", number)}));
    std::vector<std::thread> threads;
    for (const auto& trainee : trainees) threads.emplace_back([&] { trainee->train(); });
    threads.emplace_back([&] {
      for (auto& duel : short_lived) {
        const Sample batch = sample(0);
        duel->model.submit(batch.inputs, batch.labels, squared_error);
        duel->model.step(*(duel->sgd = std::make_unique<Optimizer>(duel->model, PlainTraining::rule())));
        duel->model.submit(batch.inputs, batch.labels, squared_error);
        duel.reset();
      }
    });
    for (std::thread& thread : threads) thread.join();
    for (const auto& trainee : trainees) CHECK(trainee->is_as_plain());
  }
}

TEST_SUITE("random programs") {
  TEST_CASE("whatever a program does in whatever order, the bits are the plain loop's") {
    for (uint32_t seed = 0; seed < 12; ++seed) {
      CAPTURE(seed);
      std::mt19937 chance(seed);
      const auto pick = [&](int count) { return static_cast<int>(chance() % static_cast<uint32_t>(count)); };
      set_devices(concat("virtual:", 1 + pick(4), ",debug"));
      at::manual_seed(seed);
      ModelOptions options;
      options.run.microbatches = 1 + pick(3);
      options.run.fault_tolerant = pick(2) == 0;
      options.run.recompute_grain = pick(2) == 0 ? RecomputeGrain::kLayer : RecomputeGrain::kStage;
      Duel duel(pick(2) == 0, options);
      std::deque<Model::Pending> pending;
      std::vector<Tensor> losses, expected;
      const auto finish = [&] {
        losses.push_back(pending.front().finish().loss);
        pending.pop_front();
      };
      for (int act = 0; act < 24; ++act) {
        const Sample batch = sample(1000 * seed + static_cast<uint64_t>(act));
        switch (pick(9)) {
          case 0:
          case 1:
            CHECK(duel.call(1000 * seed + static_cast<uint64_t>(act)));
            break;
          case 2:
          case 3: {
            const uint64_t call = duel.model.calls();
            pending.push_back(duel.model.submit(batch.inputs, batch.labels, squared_error));
            expected.push_back(duel.plain.call(duel.model, call, batch, duel.microbatches()));
            break;
          }
          case 4:
            if (!pending.empty()) finish();
            break;
          case 5:
            duel.step();
            break;
          case 6:
            while (!pending.empty()) finish();
            duel.synchronize();
            duel.chain.trap->throw_from(1 + pick(duel.microbatches()));
            try {
              duel.call_alone();
              FAIL("nothing was thrown");
            } catch (const OnPurpose&) {
            }
            duel.chain.trap->clear();
            duel.synchronize();
            break;
          case 7:
            set_devices(concat("virtual:", 1 + pick(4)));
            break;
          case 8: {
            const at::NoGradGuard no_grad;
            duel.chain.norm->eval();  // so that it changes no buffer
            duel.model.forward(batch.inputs);
            duel.chain.norm->train();
            break;
          }
        }
      }
      while (!pending.empty()) finish();
      CHECK(alike(losses, expected));
      CHECK(duel.goes_on());
    }
  }
}
