#include <roundpipe/roundpipe.h>

#include <functional>
#include <future>
#include <optional>

#include <doctest/doctest.h>

#include "support/chain.h"
#include "support/frontend.h"

using namespace roundpipe;
using namespace roundpipe::support;

namespace {

// A model whose layer waits until the program is interrupted.
struct Stuck {
  explicit Stuck(bool with_optimizer) {
    if (with_optimizer) sgd = std::make_unique<Optimizer>(duel.model, PlainTraining::rule());
    duel.call_alone(0);
    duel.model.zero_grad();
  }
  // From visit number `visit` on, the layer with the trap waits.
  void hold(int visit = 1) {
    let_go = std::promise<void>();
    duel.chain.trap->set(visit, [gone = let_go.get_future().share()](const Tensor& value) {
      gone.wait();
      return value;
    });
    test_frontend.interrupt([this] { let_go.set_value(); });
  }
  Model& model() { return duel.model; }
  TrainResult call() { return model().forward_backward(batch.inputs, batch.labels, squared_error); }

  Duel duel;
  std::unique_ptr<Optimizer> sgd;
  std::promise<void> let_go;
  Sample batch = sample(1);
};

// What the program waits in, and whether a fused optimizer steps.
struct Wait {
  std::string name;
  bool with_optimizer;
  std::function<void(Stuck&)> in;
};

const std::vector<Wait>& waits() {
  static const std::vector<Wait> all = {
      {"forward", false,
       [](Stuck& stuck) {
         stuck.hold();
         stuck.model().forward(stuck.batch.inputs);
       }},
      {"forward without gradients", false,
       [](Stuck& stuck) {
         const at::NoGradGuard no_grad;
         stuck.hold();
         stuck.model().forward(stuck.batch.inputs);
       }},
      {"the backward of autograd", false,
       [](Stuck& stuck) {
         const Tensor loss = squared_error(stuck.model().forward(stuck.batch.inputs), stuck.batch.labels);
         stuck.hold();
         loss.backward();
       }},
      {"forward_backward", true,
       [](Stuck& stuck) {
         stuck.hold();
         stuck.call();
       }},
      {"forward_backward, for the gradients", false,
       [](Stuck& stuck) {
         RunOptions options = stuck.model().run_options();
         options.route = schedule::Stages{{{0, 4}}, {{4, 6}, {0, 4}}};
         stuck.hold(6);  // a recomputation
         stuck.model().forward_backward(stuck.batch.inputs, stuck.batch.labels, squared_error, options);
       }},
      {"finish", true,
       [](Stuck& stuck) {
         stuck.hold(2);
         auto first = stuck.model().submit(stuck.batch.inputs, stuck.batch.labels, squared_error);
         auto second = stuck.model().submit(stuck.batch.inputs, stuck.batch.labels, squared_error);
         first.finish();
       }},
      {"synchronize", true,
       [](Stuck& stuck) {
         stuck.hold();
         auto pending = stuck.model().submit(stuck.batch.inputs, stuck.batch.labels, squared_error);
         stuck.model().synchronize();
       }},
      {"synchronize, behind a step", true,
       [](Stuck& stuck) {
         stuck.hold();
         auto pending = stuck.model().submit(stuck.batch.inputs, stuck.batch.labels, squared_error);
         stuck.model().step(*stuck.sgd);
         stuck.model().synchronize();
       }},
      {"a step by libtorch's optimizer", false,
       [](Stuck& stuck) {
         torch::optim::SGD sgd(stuck.duel.chain.parameters(), 0.1);
         stuck.hold();
         auto pending = stuck.model().submit(stuck.batch.inputs, stuck.batch.labels, squared_error);
         stuck.model().step(sgd);
       }},
      {"the third step", true,
       [](Stuck& stuck) {
         stuck.hold();
         for (int step = 0; step < 3; ++step) {
           auto pending = stuck.model().submit(stuck.batch.inputs, stuck.batch.labels, squared_error);
           stuck.model().step(*stuck.sgd);
         }
       }},
      {"a synchronous step", true,
       [](Stuck& stuck) {
         stuck.hold();
         auto pending = stuck.model().submit(stuck.batch.inputs, stuck.batch.labels, squared_error);
         stuck.model().step(*stuck.sgd, {.asynchronous = false}).wait();
       }},
      {"the norm of the gradients", true,
       [](Stuck& stuck) {
         stuck.hold();
         auto pending = stuck.model().submit(stuck.batch.inputs, stuck.batch.labels, squared_error);
         const Step step = stuck.model().step(*stuck.sgd, {.max_grad_norm = 1.0});
         step.grad_norm();
       }},
      {"the weights", true,
       [](Stuck& stuck) {
         stuck.hold();
         auto pending = stuck.model().submit(stuck.batch.inputs, stuck.batch.labels, squared_error);
         stuck.model().step(*stuck.sgd, {.asynchronous = false});
         stuck.model().named_parameters();
       }},
      {"another optimizer", true,
       [](Stuck& stuck) {
         stuck.hold();
         auto pending = stuck.model().submit(stuck.batch.inputs, stuck.batch.labels, squared_error);
         Optimizer(stuck.model(), PlainTraining::rule());
       }},
  };
  return all;
}

// What it computes now is what a plain loop computes from the same weights.
bool is_sound(Stuck& stuck) {
  Model& model = stuck.model();
  try {
    model.synchronize();
  } catch (const std::exception&) {  // what had gone wrong is told once
    model.synchronize();
  }
  model.zero_grad();
  for (Tensor& parameter : stuck.duel.chain.parameters()) parameter.mutable_grad() = Tensor();
  PlainTraining plain(stuck.duel.chain, /*asynchronous=*/false);
  bool same = true;
  for (uint64_t number = 7; number < 9; ++number) {
    const Sample batch = sample(number);
    const uint64_t call = model.calls();
    const Tensor loss = model.forward_backward(batch.inputs, batch.labels, squared_error).loss;
    same = same && same_bits(loss, plain.call(model, call, batch, 3));
  }
  if (stuck.sgd) {
    stuck.sgd = std::make_unique<Optimizer>(model, PlainTraining::rule());
    model.step(*stuck.sgd, {.asynchronous = false});
  } else {
    torch::optim::SGD sgd(stuck.duel.chain.parameters(), PlainTraining::rule());
    model.step(sgd);
  }
  plain.step();
  return same && alike(stuck.duel.state(), plain.state());
}

}  // namespace

TEST_SUITE("interrupts") {
  TEST_CASE("each wait ends, and the model goes on with the plain loop's bits") {
    for (const int count : {1, 2}) {
      for (const Wait& wait : waits()) {
        CAPTURE(count);
        CAPTURE(wait.name);
        set_devices(concat("virtual:", count));
        at::manual_seed(1);
        Stuck stuck(wait.with_optimizer);
        for (int round = 0; round < 2; ++round) {
          CHECK_THROWS_AS(wait.in(stuck), Interrupted);
          CHECK_FALSE(test_frontend.take_back());
          stuck.duel.chain.trap->clear();
          CHECK(is_sound(stuck));
        }
      }
    }
  }

  TEST_CASE("a batch that was interrupted leaves nothing, and the ones before it are kept") {
    set_devices("virtual:2");
    at::manual_seed(2);
    Stuck stuck(/*with_optimizer=*/true);
    Duel& duel = stuck.duel;
    duel.sgd = std::move(stuck.sgd);
    PlainTraining plain(duel.chain, false);
    const auto call = [&](uint64_t number) {
      const Sample batch = sample(number);
      const uint64_t own = duel.model.calls();
      const Tensor loss = duel.model.forward_backward(batch.inputs, batch.labels, squared_error).loss;
      CHECK(alike({loss}, {plain.call(duel.model, own, batch, 3)}));
    };
    call(3);
    duel.model.synchronize();
    stuck.hold(2);
    CHECK_THROWS_AS(stuck.call(), Interrupted);
    call(4);
    duel.model.step(*duel.sgd, {.asynchronous = false});
    plain.step();
    call(5);
    duel.model.step(*duel.sgd, {.asynchronous = false});
    plain.step();
    CHECK(alike(duel.state(), plain.state()));
  }

  TEST_CASE("a wait that is interrupted again and again") {
    set_devices("virtual:2");
    at::manual_seed(3);
    Stuck stuck(/*with_optimizer=*/true);
    for (int round = 0; round < 6; ++round) {
      stuck.hold(1 + round);
      const auto train = [&] {
        for (int step = 0; step < 4; ++step) {
          stuck.call();
          stuck.model().step(*stuck.sgd);
        }
        stuck.model().synchronize();
      };
      CHECK_THROWS_AS(train(), Interrupted);
    }
    CHECK(is_sound(stuck));
  }
}
