#include <roundpipe/roundpipe.h>

#include <optional>

#include <doctest/doctest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <roundpipe/device/fault.h>
#include <roundpipe/runtime/engine.h>

#include "support/chain.h"

using namespace roundpipe;
using namespace roundpipe::support;

namespace {

// How batches are given to a model, and who steps.
enum class Way { kForwardBackward, kAutograd, kSubmit };
struct Kind {
  std::string name;
  Way way;
  bool fused;
  bool asynchronous;
  int gradient_groups = 1;
};
const std::vector<Kind> kKinds = {{"asynchronous", Way::kForwardBackward, true, true},
                                  {"synchronous", Way::kForwardBackward, true, false},
                                  {"libtorch's optimizer", Way::kForwardBackward, false, false},
                                  {"autograd", Way::kAutograd, true, true},
                                  {"submitted", Way::kSubmit, true, true},
                                  {"in groups", Way::kForwardBackward, true, true, 3}};

struct Outcome {
  std::vector<Tensor> losses, state;
};
bool same(const Outcome& a, const Outcome& b) { return same_state(a.losses, b.losses) && same_state(a.state, b.state); }

constexpr int kSteps = 4;

// The layer with the trap is a stage of its own, and the last stage is fused with the loss.
RunOptions in_stages() {
  schedule::Stages stages;
  stages.forward = {{0, Chain::kTrap}, {Chain::kTrap, Chain::kTrap + 1}};
  stages.backward = {{Chain::kTrap + 1, 6}, {Chain::kTrap, Chain::kTrap + 1}, {0, Chain::kTrap}};
  RunOptions options;
  options.microbatches = 3;
  options.route = stages;
  return options;
}

// The last stage's forward alone, too.
RunOptions in_two_calls() {
  RunOptions options = in_stages();
  auto& stages = std::get<schedule::Stages>(options.route);
  stages.forward.push_back(stages.backward.front());
  return options;
}

ModelOptions tolerant() {
  ModelOptions options;
  options.run.fault_tolerant = true;
  return options;
}

// Four steps of two batches each, on the current devices. `check`: beside a plain loop.
Outcome train(const Kind& kind, bool check = false) {
  at::manual_seed(1);
  ModelOptions options = tolerant();
  // So that the route, and with it how many jobs a device gets, does not depend on measured times.
  options.run.route = (kind.way == Way::kAutograd ? in_two_calls() : in_stages()).route;
  options.run.gradient_groups = kind.gradient_groups;
  Duel duel(kind.asynchronous, options);
  torch::optim::SGD plain_sgd(duel.chain.parameters(), PlainTraining::rule());
  Outcome outcome;
  std::vector<Tensor> expected;
  std::optional<Model::Pending> pending;
  for (uint64_t number = 0; number < 2 * kSteps; ++number) {
    const Sample batch = sample(number);
    const uint64_t call = duel.model.calls();
    if (kind.way == Way::kSubmit) {
      auto following = duel.model.submit(batch.inputs, batch.labels, squared_error);
      if (pending) outcome.losses.push_back(pending->finish().loss);
      pending = std::move(following);
    } else if (kind.way == Way::kAutograd) {
      const Tensor loss = squared_error(duel.model.forward(batch.inputs), batch.labels);
      loss.backward();
      outcome.losses.push_back(loss.detach());
    } else {
      outcome.losses.push_back(duel.model.forward_backward(batch.inputs, batch.labels, squared_error).loss);
    }
    if (check) expected.push_back(duel.plain.call(duel.model, call, batch, duel.microbatches()));
    if (number % 2 == 0) continue;
    if (kind.fused) {
      duel.step();
    } else {
      duel.model.step(plain_sgd);
      duel.plain.step();
    }
  }
  if (pending) outcome.losses.push_back(pending->finish().loss);
  outcome.state = duel.state();
  if (check) {
    // A loss of the whole batch is summed in another order.
    if (kind.way != Way::kAutograd) CHECK(alike(outcome.losses, expected));
    CHECK(alike(outcome.state, duel.plain.state()));
  }
  return outcome;
}

std::vector<std::string> failed_devices() {
  std::vector<std::string> failed;
  for (const DeviceInfo& device : devices()) {
    if (!device.failure.empty()) failed.push_back(device.name);
  }
  return failed;
}

// Passes its input on; its backward fails.
struct FailingFunction : torch::autograd::Function<FailingFunction> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& value) { return value.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw OnPurpose("in a custom function");
  }
};

// Where a layer fails.
struct Place {
  std::string name;
  int visit;  // from which on: forward and recomputation of three microbatches make six, of which the last is no
              // forward
  Trap::Action action;
};
const std::vector<Place>& places() {
  static const std::vector<Place> all = {
      {"the forward", 2, [](const Tensor&) -> Tensor { throw OnPurpose("in the forward"); }},
      {"the recomputation", 6, [](const Tensor&) -> Tensor { throw OnPurpose("in the recomputation"); }},
      {"a hook", 1,
       [](Tensor value) {
         value.register_hook([](const Tensor&) -> Tensor { throw OnPurpose("in a hook"); });
         return value;
       }},
      {"a function of autograd", 1, [](const Tensor& value) { return FailingFunction::apply(value); }},
  };
  return all;
}

}  // namespace

TEST_SUITE("device failures") {
  TEST_CASE("training goes on with the plain loop's bits, whenever a device fails") {
    for (const Kind& kind : kKinds) {
      CAPTURE(kind.name);
      set_devices("virtual:3");
      const Outcome expected = train(kind, /*check=*/kind.gradient_groups == 1);
      for (const char* fault : {"0:error@1", "1:error@7", "2:error@16", "0:slow@3+1ms,fail=1:error@12"}) {
        CAPTURE(fault);
        set_devices(concat("virtual:3,fail=", fault));
        CHECK(same(train(kind), expected));
        const std::string named = std::string(fault).substr(std::string(fault).find(":error") - 1, 1);
        CHECK(failed_devices() == std::vector<std::string>{concat("virtual:", named)});
      }
    }
  }

  TEST_CASE("a device that hangs is given up by its watchdog") {
    const Kind kind = kKinds.front();
    set_devices("virtual:3");
    const Outcome expected = train(kind);
    set_devices("virtual:1,virtual:1,fail=hang@5,watchdog=200ms,virtual:1");
    CHECK(same(train(kind), expected));
    CHECK(failed_devices() == std::vector<std::string>{"virtual:1"});
    CHECK(devices()[1].failure.find("its watchdog's time") != std::string::npos);
    CHECK(restore_devices() == std::vector<std::string>{"virtual:1"});
    runtime::Engine::current()->release_hangs();
    CHECK(same(train(kind), expected));
  }

  TEST_CASE("devices keep failing and coming back") {
    const Kind kind = kKinds.front();
    set_devices("virtual:4");
    const Outcome expected = train(kind);
    set_devices("virtual:4,watchdog=200ms");
    const auto engine = runtime::Engine::current();
    const std::vector<std::pair<std::string, std::string>> faults = {{"error@", ""}, {"hang@", ""}, {"slow@", "+2ms"}};
    for (int round = 0; round < 6; ++round) {
      for (int device = 0; device < 3; ++device) {
        const auto& [what, how] = faults[static_cast<size_t>(device)];
        engine->pool_worker((round + device) % 4)
            .device()
            .inject(device::parse_fault(concat(what, 1 + 5 * device + round, how)));
      }
      CHECK(same(train(kind), expected));
      engine->release_hangs();
      restore_devices();
      CHECK(failed_devices().empty());
    }
  }

  TEST_CASE("without fault tolerance, the error names the device, and the model goes on without it") {
    for (const int at : {1, 4, 9}) {
      set_devices(concat("virtual:2,fail=1:error@", at));
      at::manual_seed(2);
      Duel duel;
      std::string message;
      while (message.empty()) {
        try {
          duel.call_alone();
          duel.model.zero_grad();
        } catch (const DeviceError& error) {
          message = error.what();
        }
      }
      CAPTURE(message);
      CHECK(message.starts_with("[virtual:1] the device failed"));
      CHECK(message.find("1 of 2 are left") != std::string::npos);
      CHECK(message.find("no optimizer step has used a part of their gradients") != std::string::npos);
      CHECK(failed_devices() == std::vector<std::string>{"virtual:1"});
    }
  }

  TEST_CASE("the calls before a failure and after it have the plain loop's bits") {
    set_devices("virtual:3,fail=1:error@12");
    at::manual_seed(3);
    ModelOptions options;
    options.run = in_stages();
    Duel duel(false, options);
    int failures = 0;
    for (uint64_t number = 0; number < 6; ++number) {
      const Chain before = duel.chain.twin();  // a failed call changes no buffer
      try {
        const Sample batch = sample(number);
        const uint64_t call = duel.model.calls();
        const Tensor loss = duel.model.forward_backward(batch.inputs, batch.labels, squared_error).loss;
        duel.model.synchronize();
        CHECK(alike({loss}, {duel.plain.call(duel.model, call, batch, 3)}));
      } catch (const DeviceError&) {
        ++failures;
        duel.model.synchronize();
        CHECK(same_state(duel.chain.buffers(), before.buffers()));
      }
    }
    CHECK(failures == 1);
    CHECK(duel.goes_on());
  }

  TEST_CASE("when no device is left, calls fail until devices come back") {
    set_devices("virtual:2,fail=error@3");
    at::manual_seed(4);
    Duel duel(false, tolerant());
    CHECK_THROWS_AS(for (int i = 0; i < 4; ++i) duel.call_alone(), DeviceError);
    CHECK_THROWS_WITH_AS(duel.call_alone(), doctest::Contains("every device of the pool has failed"), DeviceError);
    CHECK(restore_devices() == std::vector<std::string>{"virtual:0", "virtual:1"});
    CHECK(restore_devices().empty());
    duel.model.zero_grad();
    duel.call_alone();
  }

  TEST_CASE("wrong bits are found, however batches are given") {
    for (const Way way : {Way::kForwardBackward, Way::kAutograd, Way::kSubmit}) {
      for (const int count : {2, 4}) {
        CAPTURE(count);
        set_devices(concat("virtual:", count));
        at::manual_seed(5);
        ModelOptions options;
        options.run.verify_every = 1;
        Duel duel(false, options);
        const auto call = [&](uint64_t number) {
          const Sample batch = sample(number);
          if (way == Way::kSubmit) {
            duel.model.submit(batch.inputs, batch.labels, squared_error).finish();
          } else if (way == Way::kAutograd) {
            squared_error(duel.model.forward(batch.inputs), batch.labels).backward();
          } else {
            duel.model.forward_backward(batch.inputs, batch.labels, squared_error);
          }
        };
        for (uint64_t number = 0; number < 4; ++number) {
          call(number);
          const at::NoGradGuard no_grad;
          duel.model.forward(sample(number).inputs);
        }
        duel.model.synchronize();
        CHECK(duel.model.verified_jobs() == 4);
        set_devices(concat("virtual:", count, ",fail=1:bits@6"));
        // How often the device with wrong bits computes must not depend on measured times.
        duel.model.run_options().route = (way == Way::kAutograd ? in_two_calls() : in_stages()).route;
        const auto train = [&] {
          for (uint64_t number = 0; number < 48; ++number) call(number);
          duel.model.synchronize();
        };
        CHECK_THROWS_WITH_AS(train(), doctest::Contains("[virtual:1] the device failed: it computes or copies wrong"),
                             WrongBits);
        CHECK(failed_devices() == std::vector<std::string>{"virtual:1"});
        call(1);
        duel.model.synchronize();
      }
    }
  }

  TEST_CASE("one of every so many training calls is verified") {
    set_devices("virtual:2");
    at::manual_seed(6);
    ModelOptions options;
    options.run.verify_every = 3;
    Duel duel(false, options);
    for (uint64_t number = 0; number < 7; ++number) CHECK(duel.call(number));
    duel.model.synchronize();
    CHECK(duel.model.verified_jobs() == 2);
  }
}

TEST_SUITE("errors of layers and losses") {
  TEST_CASE("they arrive as they were thrown, and what follows has the plain loop's bits") {
    for (const int count : {1, 2, 3}) {
      for (const Place& place : places()) {
        CAPTURE(count);
        CAPTURE(place.name);
        set_devices(concat("virtual:", count, ",memory=64MiB,debug"));
        at::manual_seed(7);
        Duel duel(/*asynchronous=*/true);
        duel.model.run_options() = in_stages();
        for (uint64_t step = 0; step < 2; ++step) {
          for (uint64_t part = 0; part < 2; ++part) {
            duel.synchronize();
            duel.chain.trap->set(place.visit, place.action);
            CHECK_THROWS_AS(duel.call_alone(), OnPurpose);
            duel.chain.trap->clear();
            duel.synchronize();
            CHECK(duel.call(2 * step + part));
          }
          duel.synchronize();
          duel.chain.trap->set(place.visit, place.action);
          CHECK_THROWS_AS(duel.call_alone(), OnPurpose);
          duel.chain.trap->clear();
          duel.synchronize();
          duel.step();
        }
        CHECK(alike(duel.state(), duel.plain.state()));
        CHECK(failed_devices().empty());
      }
    }
  }

  TEST_CASE("so they do from forward and backward apart, and from submitted batches") {
    for (const Place& place : places()) {
      CAPTURE(place.name);
      set_devices("virtual:2,debug");
      at::manual_seed(8);
      Duel duel;
      const Sample batch = sample(1000);
      const auto both = [&] {
        squared_error(duel.model.forward(batch.inputs), batch.labels).backward();
        duel.model.synchronize();
      };
      const auto submitted = [&] {
        auto first = duel.model.submit(batch.inputs, batch.labels, squared_error, in_stages());
        auto second = duel.model.submit(batch.inputs, batch.labels, squared_error, in_stages());
        first.finish();
        second.finish();
        duel.model.synchronize();
      };
      duel.chain.trap->set(place.visit, place.action);
      CHECK_THROWS_AS(both(), OnPurpose);
      duel.chain.trap->set(place.visit, place.action);
      CHECK_THROWS_AS(submitted(), OnPurpose);
      duel.chain.trap->clear();
      try {
        duel.model.synchronize();
      } catch (const OnPurpose&) {  // of the second batch
      }
      CHECK(duel.goes_on());
    }
  }

  // Without a norm, a layer is updated as soon as its gradient is there, which may be before another layer fails.
  TEST_CASE("a step with a norm behind a call that fails changes nothing") {
    for (const bool asynchronous : {false, true}) {
      set_devices("virtual:2");
      at::manual_seed(9);
      Duel duel(asynchronous);
      duel.model.run_options() = in_stages();
      duel.sgd = std::make_unique<Optimizer>(duel.model, PlainTraining::rule());
      const std::vector<Tensor> before = duel.state();
      duel.chain.trap->set(places()[2].visit, places()[2].action);
      const Sample batch = sample(0);
      const auto train = [&] {
        duel.model.forward_backward(batch.inputs, batch.labels, squared_error);
        duel.model.step(*duel.sgd, {.asynchronous = asynchronous, .max_grad_norm = 1e9});
        duel.model.synchronize();
      };
      CHECK_THROWS_AS(train(), OnPurpose);
      duel.chain.trap->clear();
      duel.model.synchronize();
      CHECK(same_state(duel.state(), before));
      CHECK(duel.goes_on());
    }
  }

  TEST_CASE("errors of a loss, and what is no loss") {
    const auto throws = [](const Tensor&, const Tensor&) -> Tensor { throw OnPurpose("in the loss"); };
    const auto wide = [](const Tensor& outputs, const Tensor&) { return outputs; };
    const auto none = [](const Tensor&, const Tensor&) { return std::vector<Tensor>(); };
    const auto undefined = [](const Tensor&, const Tensor&) { return Tensor(); };
    const auto cut_off = [](const Tensor& outputs, const Tensor&) { return outputs.detach().sum(); };
    for (const int count : {1, 3}) {
      set_devices(concat("virtual:", count, ",debug"));
      at::manual_seed(10);
      Duel duel;
      const Sample batch = sample(1000);
      for (int round = 0; round < 2; ++round) {
        const auto& [inputs, labels] = batch;
        CHECK_THROWS_AS(duel.model.forward_backward(inputs, labels, throws), OnPurpose);
        CHECK_THROWS_WITH_AS(duel.model.forward_backward(inputs, labels, wide), doctest::Contains("expected a scalar"),
                             std::invalid_argument);
        CHECK_THROWS_WITH_AS(duel.model.forward_backward(inputs, labels, none),
                             doctest::Contains("expected at least one"), std::invalid_argument);
        CHECK_THROWS_WITH_AS(duel.model.forward_backward(inputs, labels, undefined),
                             doctest::Contains("returned no tensor"), std::invalid_argument);
        CHECK_THROWS_WITH_AS(duel.model.forward_backward(inputs, labels, cut_off),
                             doctest::Contains("does not require grad"), std::invalid_argument);
        CHECK_THROWS_AS(duel.model.submit(inputs, labels, throws).finish(), OnPurpose);
        CHECK(duel.goes_on());
      }
    }
  }

  TEST_CASE("a NaN loss drops its batch, also where the step came first") {
    for (const int count : {1, 2}) {
      set_devices(concat("virtual:", count, ",debug"));
      at::manual_seed(11);
      Duel duel;
      const auto nan = [](const Tensor& value) { return value * std::nan(""); };
      const Sample batch = sample(1000);
      duel.step();  // makes the optimizer
      duel.chain.trap->set(1, nan);
      CHECK_THROWS_WITH_AS(duel.model.forward_backward(batch.inputs, batch.labels, squared_error),
                           doctest::Contains("is NaN"), Error);
      duel.chain.trap->set(1, nan);
      const auto train = [&] {
        auto pending = duel.model.submit(batch.inputs, batch.labels, squared_error);
        duel.model.step(*duel.sgd, {.asynchronous = false});
        pending.finish();
        duel.model.synchronize();
      };
      CHECK_THROWS_WITH_AS(train(), doctest::Contains("is NaN"), Error);
      duel.chain.trap->clear();
      CHECK(duel.goes_on());
    }
  }

  TEST_CASE("errors of different kinds in a row, and a device without memory among them") {
    set_devices("virtual:2,memory=4MiB,debug");
    at::manual_seed(12);
    Duel duel;
    duel.model.run_options() = in_stages();
    for (int round = 0; round < 2; ++round) {
      for (const Place& place : places()) {
        duel.chain.trap->set(place.visit, place.action);
        CHECK_THROWS_AS(duel.call_alone(), OnPurpose);
        duel.chain.trap->set(place.visit, [](const Tensor& value) { return value + at::empty({1 << 24}).sum(); });
        CHECK_THROWS_WITH_AS(duel.call_alone(), doctest::Contains("out of memory"), c10::OutOfMemoryError);
      }
      duel.chain.trap->clear();
      CHECK(duel.goes_on());
    }
  }

  TEST_CASE("the failure of one model leaves another alone") {
    set_devices("virtual:2");
    at::manual_seed(13);
    Duel failing(false, {.name = "failing"}), other(true, {.name = "other"});
    for (uint64_t number = 0; number < 4; ++number) {
      failing.chain.trap->throw_from(2);
      const Sample batch = sample(number);
      auto pending = failing.model.submit(batch.inputs, batch.labels, squared_error);
      CHECK(other.call(number));
      other.step();
      CHECK_THROWS_AS(pending.finish(), OnPurpose);
    }
    failing.chain.trap->clear();
    CHECK(other.goes_on());
    CHECK(failing.goes_on());
  }

  TEST_CASE("failures leave no device memory behind") {
    set_devices("virtual:2,memory=16MiB");
    at::manual_seed(14);
    Duel duel;
    duel.model.run_options() = in_stages();
    const auto used = [&] {
      duel.chain.trap->clear();
      duel.call_alone();
      int64_t most = 0;
      for (const DeviceInfo& device : devices()) most = std::max(most, device.used_bytes);
      return most;
    };
    const int64_t before = used();
    for (int round = 0; round < 5; ++round) {
      for (const Place& place : places()) {
        duel.chain.trap->set(place.visit, place.action);
        CHECK_THROWS_AS(duel.call_alone(), OnPurpose);
      }
    }
    CHECK(used() <= before + 4096);  // the memory of a stage may have grown to another stage's
  }
}
