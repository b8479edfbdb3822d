#include <roundpipe/roundpipe.h>

#include <cmath>

#include <doctest/doctest.h>

#include "support/chain.h"

using namespace roundpipe;
using namespace roundpipe::support;

namespace {

struct Mistake {
  std::function<void(Duel&)> make;
  std::string says;
};

// Each mistake is refused twice, with its text, between calls whose gradients add up; then the bits are the plain
// loop's.
void refuses(const std::vector<Mistake>& mistakes, bool with_optimizer = false) {
  for (const Mistake& mistake : mistakes) {
    CAPTURE(mistake.says);
    set_devices("virtual:2,debug");
    at::manual_seed(1);
    Duel duel;
    if (with_optimizer) duel.step();
    CHECK(duel.call(0));
    for (int round = 0; round < 2; ++round) {
      CHECK_THROWS_WITH_AS(mistake.make(duel), doctest::Contains(mistake.says.c_str()), std::invalid_argument);
    }
    CHECK(duel.goes_on());
  }
}

const Tensor& good() {
  static const Tensor inputs = at::ones({6, Chain::kIn});
  return inputs;
}
const Tensor& good_labels() {
  static const Tensor labels = at::ones({6, Chain::kOut});
  return labels;
}

Mistake batch(Tensor inputs, Tensor labels, const char* says) {
  return {[=](Duel& duel) { duel.model.forward_backward(inputs, labels, squared_error); }, says};
}
Mistake with(const std::function<void(RunOptions&)>& change, const char* says) {
  return {[=](Duel& duel) {
            RunOptions options = duel.model.run_options();
            change(options);
            duel.model.forward_backward(good(), good_labels(), squared_error, options);
          },
          says};
}
Mistake route(std::vector<schedule::Range> forward, std::vector<schedule::Range> backward, const char* says) {
  return with([=](RunOptions& options) { options.route = schedule::Stages{forward, backward}; }, says);
}

}  // namespace

TEST_SUITE("wrong use") {
  TEST_CASE("batches") {
    refuses({
        batch(at::ones({0, Chain::kIn}), good_labels(), "[inputs] the batch is empty"),
        batch(at::ones({6, Chain::kIn}, at::kMeta), good_labels(), "expected a dense strided tensor"),
        batch(good().to_sparse(), good_labels(), "expected a dense strided tensor"),
        batch(good(), good_labels().to(at::kMeta), "expected a dense strided tensor"),
        batch(good(), at::ones({0, Chain::kOut}), "[labels] tensor 0 has 0 rows (shape [0, 4]) and the batch has 6"),
        batch(good(), at::ones({2, Chain::kOut}), "[labels] tensor 0 has 2 rows (shape [2, 4]) and the batch has 6"),
        {[](Duel& duel) {
           const auto loss = [](const Tensor& outputs, const std::tuple<Tensor, Tensor>&) { return outputs.sum(); };
           duel.model.forward_backward(good(), std::tuple(at::ones({6}), at::ones({5})), loss);
         },
         "[labels] tensor 1 has 5 rows (shape [5]) and the batch has 6"},
        {[](Duel& duel) { duel.model.forward(good(), good()); }, "[values] a at::Tensor was expected"},
        {[](Duel& duel) {
           duel.model.forward_backward(Microbatches<Tensor>{{good(), good()}}, Microbatches<Tensor>{{good_labels()}},
                                       squared_error, RunOptions());
         },
         "[labels] the batch is cut into 1 microbatches, expected 2"},
        {[](Duel& duel) {
           duel.model.forward_backward(Microbatches<Tensor>{}, good_labels(), squared_error, RunOptions());
         },
         "there are no microbatches"},
        {[](Duel& duel) {
           duel.model.forward_backward(Microbatches<Tensor>{{good(), good()}}, good_labels(), squared_error);
         },
         "the options ask for 3"},
        {[](Duel& duel) {
           const auto losses = [](const Tensor& outputs, const Tensor&) {
             return std::vector<Tensor>(static_cast<size_t>(outputs.size(0)), outputs.sum());
           };
           duel.model.forward_backward(at::ones({7, Chain::kIn}), at::ones({7, Chain::kOut}), losses);
         },
         "expected the same number for each"},
    });
  }

  TEST_CASE("options of a call") {
    refuses({
        with([](RunOptions& options) { options.microbatches = 0; }, "microbatches"),
        with([](RunOptions& options) { options.microbatches = -2; }, "microbatches"),
        with([](RunOptions& options) { options.gradient_groups = 0; }, "gradient_groups"),
        with([](RunOptions& options) { options.verify_every = -1; }, "verify_every"),
        with([](RunOptions& options) { options.cut_inputs = {Cut::along(0), Cut::along(0)}; },
             "expected at most one entry for each"),
        with([](RunOptions& options) { options.cut_inputs = {Cut::along(2)}; }, "expected a dimension 2"),
        with([](RunOptions& options) { options.cut_labels = {Cut::along(-3)}; }, "expected a dimension -3"),
        with([](RunOptions& options) { options.requires_grad = false; }, "gradients are off"),
        {[](Duel& duel) {
           const at::NoGradGuard no_grad;
           duel.model.forward_backward(good(), good_labels(), squared_error);
         },
         "leave the NoGradGuard"},
        {[](Duel& duel) {
           const c10::InferenceMode inference;
           duel.model.submit(good(), good_labels(), squared_error);
         },
         "[submit] gradients are off"},
        {[](Duel& duel) {
           const at::NoGradGuard no_grad;
           duel.model.predict_memory(good(), good_labels(), squared_error);
         },
         "[predict_memory] gradients are off"},
        {[](Duel& duel) {
           duel.model.run_options().microbatches = 0;
           const auto restores = [&duel](const Duel*) { duel.model.run_options().microbatches = 3; };
           const std::unique_ptr<const Duel, decltype(restores)> restored(&duel, restores);
           duel.model.forward(good());
         },
         "microbatches"},
        {[](Duel& duel) { (void)Model(duel.chain.twin().layers(), {.run = {.gradient_groups = 0}}); },
         "gradient_groups"},
    });
  }

  TEST_CASE("stages that do not fit") {
    refuses({
        route({{0, 3}}, {{4, 6}, {0, 3}}, "before the forward of layer 3"),
        route({{0, 2}, {3, 4}}, {{4, 6}, {0, 4}}, "before the forward of layer 2"),
        route({{0, 3}, {2, 4}}, {{4, 6}, {0, 4}}, "repeats the forward of layer 2"),
        route({{0, 4}}, {{4, 7}, {0, 4}}, "expected a non-empty part of [0, 6)"),
        route({}, {}, "no job runs the forward of layer 0"),
        {[](Duel& duel) {
           duel.model.run_options().route = schedule::Stages{{{0, 4}}, {{4, 6}, {0, 4}}};
           const auto restores = [&duel](const Duel*) { duel.model.run_options().route = {}; };
           const std::unique_ptr<const Duel, decltype(restores)> restored(&duel, restores);
           duel.model.forward(good());
         },
         "[plan] the forward stages end before layer 4 of 6"},
    });
  }

  TEST_CASE("devices") {
    set_devices("virtual:2,debug");
    at::manual_seed(1);
    Duel duel;
    CHECK(duel.call(0));
    for (const char* spec : {"foo", "virtual:0", "virtual:-1", "virtual:two", "virtual:2,memory=much",
                             "virtual:2,memory=-1GiB", "virtual:2,colour=red", "virtual:2,link=0GB/s", "memory=2GiB",
                             "cuda:99", "", "virtual:1025", "virtual:2,fail=fire@1", "virtual:2,fail=7:error@1"}) {
      CHECK_THROWS_WITH_AS(set_devices(spec), doctest::Contains("[devices]"), std::invalid_argument);
      CHECK(devices().size() == 2);
    }
    CHECK(duel.goes_on());
  }

  TEST_CASE("a batch's result is taken once") {
    set_devices("virtual:2");
    Duel duel;
    auto pending = duel.model.submit(good(), good_labels(), squared_error);
    pending.finish();
    for (int round = 0; round < 2; ++round) {
      CHECK_THROWS_WITH_AS(pending.finish(), doctest::Contains("the losses have been taken already"),
                           std::invalid_argument);
    }
  }

  TEST_CASE("steps") {
    refuses(
        {
            {[](Duel& duel) {
               Duel other(false, {.name = "other"});
               other.step();
               duel.model.step(*other.sgd);
             },
             "the optimizer was not made for this model"},
            {[](Duel& duel) { duel.model.step(*duel.sgd, {.max_grad_norm = 0.0}); }, "max_grad_norm is 0"},
            {[](Duel& duel) { duel.model.step(*duel.sgd, {.max_grad_norm = -1.0}); }, "max_grad_norm is -1"},
            {[](Duel& duel) { duel.model.step(*duel.sgd, {.max_grad_norm = std::nan("")}); }, "max_grad_norm is nan"},
            {[](Duel& duel) {
               torch::optim::SGD sgd(duel.chain.parameters(), 0.1);
               duel.model.step(sgd);
             },
             "model.step(optimizer)"},
            {[](Duel& duel) { Optimizer(duel.model, optim::Algorithm::kAdam, {{{}, {}}}); }, "group 0 holds no"},
            {[](Duel& duel) {
               Optimizer(duel.model, optim::Algorithm::kSGD, {}, {.moments = optim::MomentFormat::kBlockwise8Bit});
             },
             "8-bit moments are for Adam"},
            {[](Duel& duel) {
               Optimizer(duel.model, optim::Algorithm::kSGD, {}, {.masters = optim::MasterFormat::k24Bit});
             },
             "is Float, expected bfloat16, which alone has masters of 24 bits"},
        },
        /*with_optimizer=*/true);
  }

  TEST_CASE("hyperparameters that libtorch's constructors refuse") {
    using optim::Hyperparameters;
    using Change = std::function<void(Hyperparameters&)>;
    const std::vector<std::pair<Change, std::string>> wrong = {
        {[](Hyperparameters& options) { options.lr = -0.1; }, "lr is -0.1, expected a number that is not negative"},
        {[](Hyperparameters& options) { options.lr = std::nan(""); }, "lr is nan"},
        {[](Hyperparameters& options) { options.momentum = -1; }, "momentum is -1"},
        {[](Hyperparameters& options) { options.weight_decay = -1; }, "weight_decay is -1"},
        {[](Hyperparameters& options) { options.eps = -1; }, "eps is -1"},
        {[](Hyperparameters& options) { options.beta1 = 1; }, "beta1 is 1, expected a number from 0"},
        {[](Hyperparameters& options) { options.beta2 = -0.5; }, "beta2 is -0.5"},
    };
    std::vector<Mistake> mistakes;
    for (const auto& [change, says] : wrong) {
      mistakes.push_back({[change = change](Duel& duel) {
                            UpdateRule rule = PlainTraining::rule();
                            change(rule.options);
                            Optimizer(duel.model, rule);
                          },
                          "[optimizer] " + says});
      mistakes.push_back({[change = change](Duel& duel) {
                            const Hyperparameters before = duel.sgd->options();
                            change(duel.sgd->options());
                            try {
                              duel.model.step(*duel.sgd);
                            } catch (...) {
                              duel.sgd->options() = before;
                              throw;
                            }
                          },
                          "[step] " + says});
    }
    refuses(mistakes, /*with_optimizer=*/true);
  }

  TEST_CASE("a replaced optimizer") {
    set_devices("virtual:2");
    at::manual_seed(2);
    Duel duel;
    duel.step();
    const std::unique_ptr<Optimizer> old = std::move(duel.sgd);
    duel.step();
    CHECK(duel.call(0));
    for (int round = 0; round < 2; ++round) {
      CHECK_THROWS_WITH_AS(duel.model.step(*old), doctest::Contains("another one was made since"),
                           std::invalid_argument);
    }
    CHECK(duel.goes_on());
  }

  TEST_CASE("objects that were moved from") {
    using Uses = std::vector<std::function<void()>>;
    const auto refused = [](const Uses& uses, const char* says) {
      for (size_t use = 0; use < uses.size(); ++use) {
        CAPTURE(use);
        CHECK_THROWS_WITH_AS(uses[use](), doctest::Contains(says), std::invalid_argument);
      }
    };
    set_devices("virtual:2");
    at::manual_seed(5);
    Duel duel;
    duel.step();
    CHECK(duel.call(0));
    Model& model = duel.model;
    Optimizer& optimizer = *duel.sgd;
    const RunOptions options = model.run_options();
    torch::optim::SGD plain(duel.chain.parameters(), 0.1);

    Model owner(std::move(model));
    const Uses of_model = {
        [&] { model.forward(good()); },
        [&] { model.forward_with(options, good()); },
        [&] { model.forward_microbatches(options, good()); },
        [&] { model.forward_backward(good(), good_labels(), squared_error); },
        [&] { model.submit(good(), good_labels(), squared_error); },
        [&] { model.step(optimizer); },
        [&] { model.step(plain); },
        [&] { model.predict_memory(good(), good_labels(), squared_error); },
        [&] { model.run_options(); },
        [&] { model.name(); },
        [&] { model.layers(); },
        [&] { model.last_plan(); },
        [&] { model.last_step_plan(); },
        [&] { model.costs(); },
        [&] { model.last_records(); },
        [&] { model.verified_jobs(); },
        [&] { model.layer_seed(0, 0, 0); },
        [&] { model.random_seed(); },
        [&] { model.set_random_seed(1); },
        [&] { model.calls(); },
        [&] { model.set_calls(1); },
        [&] { model.synchronize(); },
        [&] { model.named_parameters(); },
        [&] { model.zero_grad(); },
        [&] { model.fused_optimizer(); },
        [&] { model.parameter_names(); },
        [&] { model.buffer_names(); },
        [&] { Optimizer(model, optim::Algorithm::kSGD); },
    };
    refused(of_model, "[model] this model was moved from");
    model = std::move(owner);  // from where it was moved to

    Optimizer updates(std::move(optimizer));
    const Uses of_optimizer = {
        [&] { model.step(optimizer); }, [&] { optimizer.options(); },
        [&] { optimizer.options(0); },  [&] { optimizer.param_groups(); },
        [&] { optimizer.zero_grad(); }, [&] { optimizer.set_learning_rate(cosine_rate(1, 2)); },
        [&] { optimizer.steps(); },     [&] { optimizer.set_steps(1); },
    };
    refused(of_optimizer, "[optimizer] this optimizer was moved from");
    optimizer = std::move(updates);

    const Sample batch = sample(1);
    const uint64_t call = model.calls();
    Model::Pending first = model.submit(batch.inputs, batch.labels, squared_error);
    Model::Pending pending(std::move(first));
    refused({[&] { first.finish(); }, [&] { (void)first.records(); }}, "[pending batch] this pending batch was moved");
    CHECK(alike({pending.finish().loss}, {duel.plain.call(model, call, batch, duel.microbatches())}));

    Step made = model.step(optimizer, {.asynchronous = false});
    duel.plain.step();
    const Step step(std::move(made));
    refused({[&] { (void)made.grad_norm(); }, [&] { (void)made.skipped(); }, [&] { made.wait(); }},
            "[step] this step was moved from");
    step.wait();

    Layer one = layer(duel.chain.first);
    const Layer other(std::move(one));
    refused({[&] { (void)one.parameters(); }, [&] { (void)one.buffers(); }, [&] { one.named("a"); },
             [&] { one.tie("weight", other.parameters()[0].second); }, [&] { one.made_by(nullptr); },
             [&] { Model({one}); }},
            "[layer] this layer was moved from");
    CHECK(duel.goes_on());
  }

  TEST_CASE("models that cannot be made") {
    CHECK_THROWS_WITH_AS(Model(std::vector<Layer>{}), doctest::Contains("there are no layers"), std::invalid_argument);
    CHECK_THROWS_WITH_AS(Model(torch::nn::Sequential()), doctest::Contains("there are no layers"),
                         std::invalid_argument);
    const auto twice = [](const std::vector<Tensor>& own, const Tensor& x) { return x * own[0]; };
    CHECK_THROWS_WITH_AS(Model({layer({{"scale", Tensor()}}, twice)}), doctest::Contains("'scale' is undefined"),
                         std::invalid_argument);
    const Tensor computed = at::ones({4}).requires_grad_() * 2;
    CHECK_THROWS_WITH_AS(Model({layer({{"scale", computed}}, twice)}),
                         doctest::Contains("'scale' of layer 0 was computed from other tensors"),
                         std::invalid_argument);
  }

  TEST_CASE("a torch::nn::Sequential whose children have changed") {
    set_devices("virtual:2");
    torch::nn::Sequential layers{torch::nn::Linear(Chain::kIn, Chain::kOut)};
    Model model(layers);
    model.forward(good());
    layers->push_back(torch::nn::Linear(Chain::kOut, Chain::kOut));
    for (int round = 0; round < 2; ++round) {
      CHECK_THROWS_WITH_AS(model.forward(good()), doctest::Contains("were added or replaced since"),
                           std::invalid_argument);
    }
  }

  TEST_CASE("a model whose modules have changed") {
    const auto changed = [](const std::function<std::function<void()>(Chain&)>& change, const char* says) {
      CAPTURE(says);
      set_devices("virtual:2");
      at::manual_seed(3);
      Duel duel;
      duel.step();
      CHECK(duel.call(0));
      duel.model.synchronize();
      const std::function<void()> back = change(duel.chain);
      for (int round = 0; round < 2; ++round) {
        CHECK_THROWS_WITH_AS(duel.model.forward_backward(good(), good_labels(), squared_error), doctest::Contains(says),
                             std::invalid_argument);
      }
      if (!back) return;
      back();
      CHECK(duel.goes_on());
    };
    changed(
        [](Chain& chain) {
          const Tensor old = chain.first->weight;
          chain.first->weight = at::ones_like(old).set_requires_grad(true);
          return [&chain, old] { chain.first->weight = old; };
        },
        "replaced");
    changed(
        [](Chain& chain) {
          chain.first->register_parameter("extra", at::ones({2}));
          return std::function<void()>();
        },
        "were added, removed or replaced");
    changed(
        [](Chain& chain) {
          chain.first->to(at::kDouble);
          return std::function<void()>();
        },
        "has become");
  }

  TEST_CASE("a hook on the gradient of a parameter") {
    set_devices("virtual:2");
    at::manual_seed(6);
    Duel duel;
    CHECK(duel.call(0));
    const unsigned hook = duel.chain.last->weight.register_hook([](const Tensor& gradient) { return gradient * 2; });
    const std::function<void()> uses[] = {
        [&] { duel.model.forward_backward(good(), good_labels(), squared_error); },
        [&] { duel.model.submit(good(), good_labels(), squared_error); },
        [&] { duel.model.forward(good()); },
    };
    for (const auto& use : uses) {
      CHECK_THROWS_WITH_AS(use(), doctest::Contains("[model] parameter '5.weight' has a hook on its gradient"),
                           std::invalid_argument);
    }
    {
      const at::NoGradGuard no_grad;
      duel.chain.norm->eval();
      CHECK(duel.model.forward(good()).defined());
      duel.chain.norm->train();
    }
    duel.chain.last->weight.remove_hook(hook);
    CHECK(duel.goes_on());
  }

  TEST_CASE("a call from a layer or a loss") {
    set_devices("virtual:2");
    at::manual_seed(4);
    Duel duel, other(false, {.name = "other"});
    const auto calls = [&other](const Tensor& outputs, const Tensor&) {
      return outputs.sum() + other.model.forward(good()).sum();
    };
    CHECK_THROWS_WITH_AS(duel.model.forward_backward(good(), good_labels(), calls),
                         doctest::Contains("has called a model in the pipeline"), Error);
    duel.chain.trap->set(1, [&other](const Tensor& value) {
      other.model.synchronize();
      return value;
    });
    CHECK_THROWS_WITH_AS(duel.model.forward(good()), doctest::Contains("has called a model in the pipeline"), Error);
    duel.chain.trap->clear();
    CHECK(duel.goes_on());
    CHECK(other.goes_on());
    // Those that wait for devices, or end them.
    other.step();
    other.call(3);
    const std::vector<std::function<void()>> waits = {
        [&other] { other.model.step(*other.sgd); },
        [&other] { other.model.predict_memory(good(), good_labels(), squared_error); },
        [] { set_devices("virtual:1"); },
        [] { restore_devices(); },
        [] { shut_down(); },
    };
    for (const auto& use : waits) {
      const auto uses = [&use](const Tensor& outputs, const Tensor&) {
        use();
        return outputs.sum();
      };
      CHECK_THROWS_WITH_AS(duel.model.forward_backward(good(), good_labels(), uses),
                           doctest::Contains("a layer or a loss function has"), Error);
    }
    CHECK(duel.goes_on());
    other.step();
    CHECK(other.goes_on());
  }
}
