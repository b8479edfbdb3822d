#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>

#include <doctest/doctest.h>

#include <roundpipe/files/manifest.h>
#include <roundpipe/files/run_folder.h>
#include <roundpipe/roundpipe.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include "../temporary_folder.h"

using namespace roundpipe;
using at::Tensor;
namespace nn = torch::nn;
namespace fs = std::filesystem;

namespace {

nn::Sequential mlp(at::ScalarType dtype = at::kFloat) {
  nn::Sequential layers{nn::Linear(5, 9), nn::BatchNorm1d(9), nn::Functional(torch::tanh), nn::Dropout(0.2),
                        nn::Linear(9, 3)};
  layers->to(dtype);
  return layers;
}

Tensor squares(const Tensor& outputs, const Tensor& label) { return (outputs - label).to(at::kFloat).square().sum(); }

// AdamW steps the vectors beside Muon.
std::vector<ParameterGroup> groups_of(const UpdateRule& rule) {
  if (rule.algorithm != optim::Algorithm::kMuon) return {};
  return {{[](const std::string&, const Tensor& parameter) { return parameter.dim() < 2; }, {.use_muon = false}}};
}

UpdateRule muon() {
  UpdateRule rule(optim::Algorithm::kMuon);
  rule.options.ns_steps = 3;
  rule.options.match_rms_adamw = true;
  return rule;
}

// One training: what a program makes at its start. Batches are drawn from the saved generator, so they go on, too.
struct Training {
  explicit Training(at::ScalarType dtype = at::kFloat, const UpdateRule& rule = torch::optim::AdamWOptions(0.02),
                    const OptimizerFormat& format = {})
      : layers(seeded(dtype)), model(layers), optimizer(model, rule, groups_of(rule), format) {
    optimizer.set_learning_rate(cosine_rate(2, 12));
    model.run_options().microbatches = 3;
  }
  static nn::Sequential seeded(at::ScalarType dtype) {
    at::manual_seed(4);
    return mlp(dtype);
  }
  Tensor call() {
    const Tensor batch = at::randn({8, 5}), labels = at::randn({8, 3});
    return model
        .forward_backward(batch.to(layers->parameters()[0].scalar_type()), labels,
                          [this](const Tensor& out, const Tensor& label) {
                            const Tensor loss = squares(out, label);
                            return scaler ? scaler->scale(loss) : loss;
                          })
        .loss;
  }
  Step step(bool asynchronous) {
    return model.step(optimizer, {.asynchronous = asynchronous, .max_grad_norm = 5, .scaler = scaler.get()});
  }
  std::vector<Tensor> run(int steps, bool asynchronous) {
    std::vector<Tensor> losses;
    for (int i = 0; i < steps; ++i) {
      losses.push_back(call());
      step(asynchronous);
    }
    return losses;
  }
  std::vector<Tensor> state() {
    model.synchronize();
    std::vector<Tensor> all;
    for (const auto& named : layers->named_parameters()) all.push_back(named.value().detach().clone());
    for (const auto& named : layers->named_buffers()) all.push_back(named.value().clone());
    return all;
  }
  nn::Sequential layers;
  Model model;
  Optimizer optimizer;
  std::unique_ptr<GradScaler> scaler;
};

void check_same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    CAPTURE(i);
    CHECK(at::equal(a[i], b[i]));
  }
}

std::vector<std::string> told;
struct Listener : Frontend {
  bool warn(const std::string& notice) override {
    told.push_back(notice);
    return true;
  }
};

// Calls `function` and returns the text of what it throws, of type E.
template <typename E, typename F>
std::string thrown(F function) {
  try {
    function();
  } catch (const E& error) {
    return error.what();
  }
  FAIL("nothing was thrown");
  return "";
}

}  // namespace

TEST_SUITE("checkpoint") {
  TEST_CASE("a training that is loaded goes on with the same bits, on other devices") {
    struct Kind {
      const char* name;
      at::ScalarType dtype;
      UpdateRule rule;
      OptimizerFormat format;
      bool scaled;
    };
    const std::vector<Kind> kinds{
        {"fp32", at::kFloat, torch::optim::AdamWOptions(0.02), {}, false},
        {"bf16 with 8-bit moments",
         at::kBFloat16,
         torch::optim::AdamOptions(0.02),
         {.moments = optim::MomentFormat::kBlockwise8Bit},
         false},
        {"bf16 with masters of 24 bits",
         at::kBFloat16,
         torch::optim::AdamWOptions(0.02),
         {.masters = optim::MasterFormat::k24Bit},
         false},
        {"fp16 with a scaler", at::kHalf, torch::optim::SGDOptions(0.02).momentum(0.9), {}, true},
        {"Muon", at::kBFloat16, muon(), {}, false},
        {"gradients in fp32", at::kBFloat16, optim::Algorithm::kNAdam, {.gradients_in_fp32 = true}, false},
    };
    for (const Kind& kind : kinds) {
      for (const bool asynchronous : {true, false}) {
        CAPTURE(kind.name);
        CAPTURE(asynchronous);
        const auto make = [&](const char* devices) {
          set_devices(devices);
          auto made = std::make_unique<Training>(kind.dtype, kind.rule, kind.format);
          if (kind.scaled) made->scaler = std::make_unique<GradScaler>(GradScalerOptions{.init_scale = 1 << 14});
          return made;
        };
        const support::TemporaryFolder folder;
        std::vector<Tensor> losses, state;
        {
          const auto training = make("virtual:3");
          training->run(4, asynchronous);
          training->call();  // gradients that no step has consumed
          const Save save = save_checkpoint(
              folder.path(), training->model, training->optimizer,
              {.scaler = training->scaler.get(), .state = {{"position", StateValue::dict({{"row", 40}})}}});
          training->step(asynchronous);
          losses = training->run(5, asynchronous);
          state = training->state();
          CHECK(save.wait().bytes > 0);
          CHECK(save.step() == 4);
        }
        for (const char* const devices : {"virtual:1", "virtual:2"}) {
          const auto resumed = make(devices);
          at::manual_seed(99);
          const Loaded loaded =
              load_checkpoint(folder.path(), resumed->model, resumed->optimizer, {.scaler = resumed->scaler.get()});
          CHECK(loaded.step == 4);
          CHECK(loaded.value("position").at("row").as_int() == 40);
          CHECK(resumed->optimizer.steps() == 4);
          resumed->step(asynchronous);
          check_same(resumed->run(5, asynchronous), losses);
          check_same(resumed->state(), state);
        }
      }
    }
  }

  TEST_CASE("losses go on in chunks of the size that they had") {
    set_devices("virtual:1");
    const auto make = [](std::optional<int64_t> bytes) {
      auto made = std::make_unique<Training>(at::kFloat, torch::optim::SGDOptions(0.1), OptimizerFormat{});
      made->model.run_options().chunk_logit_bytes = bytes;
      return made;
    };
    using Bytes = std::optional<int64_t>;
    struct Case {
      Bytes saved, own, after;
    };
    // 0: as the host has it, 64 MiB.
    for (const auto& [saved, own, after] : {Case{1 << 20, 0, 1 << 20}, Case{0, 0, 0}, Case{0, 1 << 20, 64 << 20},
                                            Case{{}, 0, 0}, Case{1 << 20, {}, {}}}) {
      const support::TemporaryFolder folder;
      const auto first = make(saved);
      first->run(1, false);
      save_checkpoint(folder.path(), first->model, first->optimizer).wait();
      const auto second = make(own);
      told.clear();
      set_frontend(std::make_unique<Listener>());
      load_checkpoint(folder.path(), second->model, second->optimizer);
      set_frontend(nullptr);
      CHECK(second->model.run_options().chunk_logit_bytes == after);
      CHECK(told.size() == (own == after ? 0 : 1));
    }
  }

  TEST_CASE("libtorch's optimizers are saved and go on") {
    set_devices("virtual:2");
    using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const nn::Sequential&)>;
    const std::vector<Make> makers{
        [](const auto& layers) {
          return std::make_unique<torch::optim::AdamW>(layers->parameters(),
                                                       torch::optim::AdamWOptions(0.02).amsgrad(true));
        },
        [](const auto& layers) { return std::make_unique<torch::optim::Adam>(layers->parameters(), 0.01); },
        [](const auto& layers) {
          return std::make_unique<torch::optim::SGD>(layers->parameters(),
                                                     torch::optim::SGDOptions(0.02).momentum(0.9));
        },
        [](const auto& layers) { return std::make_unique<torch::optim::Adagrad>(layers->parameters(), 0.01); },
        [](const auto& layers) {
          return std::make_unique<torch::optim::RMSprop>(
              layers->parameters(), torch::optim::RMSpropOptions(0.01).momentum(0.5).centered(true));
        }};
    for (const Make& make : makers) {
      const auto run = [](Model& model, torch::optim::Optimizer& optimizer, int steps) {
        std::vector<Tensor> losses;
        for (int i = 0; i < steps; ++i) {
          const Tensor batch = at::randn({8, 5}), labels = at::randn({8, 3});
          losses.push_back(model.forward_backward(batch, labels, squares).loss);
          model.step(optimizer);
        }
        return losses;
      };
      const support::TemporaryFolder folder;
      nn::Sequential layers = Training::seeded(at::kFloat);
      Model model(layers);
      const auto optimizer = make(layers);
      run(model, *optimizer, 3);
      // One byte of memory: everything is written before the call returns.
      save_checkpoint(folder.path(), model, *optimizer, {.step = 3, .snapshot_memory_bytes = 1}).wait();
      const std::vector<Tensor> losses = run(model, *optimizer, 3);
      nn::Sequential other = mlp();
      Model resumed(other);
      const auto again = make(other);
      CHECK(load_checkpoint(folder.path(), resumed, *again).step == 3);
      check_same(run(resumed, *again, 3), losses);
      check_same(other->parameters(), layers->parameters());
    }
  }

  TEST_CASE("a number of microbatches that was chosen is the checkpoint's") {
    const support::TemporaryFolder folder;
    set_devices("virtual:2");
    Training training;
    training.model.run_options().microbatches = kAutoMicrobatches;
    training.run(1, false);
    const int chosen = training.model.auto_microbatches().value();
    save_checkpoint(folder.path(), training.model, training.optimizer).wait();
    const std::vector<Tensor> losses = training.run(1, false);
    Training resumed;
    resumed.model.run_options().microbatches = kAutoMicrobatches;
    resumed.model.set_auto_microbatches(chosen + 1);
    load_checkpoint(folder.path(), resumed.model, resumed.optimizer);
    CHECK(resumed.model.auto_microbatches() == chosen);
    CHECK(resumed.model.run_options().microbatches == kAutoMicrobatches);
    check_same(resumed.run(1, false), losses);
  }

  TEST_CASE("copies that functions step are saved and go on, with what calls do not read yet") {
    struct Copied {
      explicit Copied(at::ScalarType dtype) : layers(Training::seeded(dtype)), model(layers) {
        std::vector<Tensor> copies;
        for (const auto& [name, copy] : model.optimizer_parameters(at::kFloat)) copies.push_back(copy);
        optimizer = std::make_unique<torch::optim::AdamW>(copies, torch::optim::AdamWOptions(0.02));
        model.run_options().microbatches = 2;
      }
      Tensor call() {
        const Tensor batch = at::randn({8, 5}), labels = at::randn({8, 3});
        return model.forward_backward(batch.to(layers->parameters()[0].scalar_type()), labels, squares).loss;
      }
      void step(bool asynchronous) {
        model.step(
            [&] {
              optimizer->step();
              optimizer->zero_grad();
            },
            asynchronous);
      }
      std::vector<Tensor> run(int steps, bool asynchronous) {
        std::vector<Tensor> losses;
        for (int i = 0; i < steps; ++i) {
          losses.push_back(call());
          step(asynchronous);
        }
        return losses;
      }
      nn::Sequential layers;
      Model model;
      std::unique_ptr<torch::optim::AdamW> optimizer;
    };
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const bool asynchronous : {true, false}) {
        CAPTURE(asynchronous);
        set_devices("virtual:3");
        const support::TemporaryFolder folder;
        Copied training(dtype);
        training.run(3, asynchronous);
        training.call();  // gradients that no step has consumed
        // One byte of memory: everything is written before the call returns.
        const Save save = save_checkpoint(folder.path(), training.model, *training.optimizer,
                                          {.step = 3, .snapshot_memory_bytes = 1});
        training.step(asynchronous);
        const std::vector<Tensor> losses = training.run(3, asynchronous);
        CHECK(save.wait().bytes > 0);
        CHECK(fs::exists(fs::path(save.folder()) / "previous.safetensors") == asynchronous);
        set_devices("virtual:2");
        Copied resumed(dtype);
        resumed.run(1, true);  // loading replaces whatever there is
        CHECK(load_checkpoint(folder.path(), resumed.model, *resumed.optimizer).step == 3);
        resumed.step(asynchronous);
        check_same(resumed.run(3, asynchronous), losses);
        training.model.synchronize();
        resumed.model.synchronize();
        check_same(resumed.layers->parameters(), training.layers->parameters());
        torch::optim::AdamW other(training.layers->parameters(), torch::optim::AdamWOptions(0.02));
        CHECK(thrown<std::invalid_argument>([&] {
                save_checkpoint(folder.path(), training.model, other, {.step = 4});
              }).find("expected its optimizer_parameters()") != std::string::npos);
        nn::Sequential plain = mlp(dtype);
        Model stepped(plain);
        torch::optim::AdamW own(plain->parameters(), torch::optim::AdamWOptions(0.02));
        if (asynchronous || dtype != at::kFloat) {
          CHECK_THROWS_AS(load_checkpoint(folder.path(), stepped, own), std::invalid_argument);
        } else {
          load_checkpoint(folder.path(), stepped, own);
        }
      }
    }
  }

  TEST_CASE("a damaged checkpoint is told, and the one before is loaded") {
    set_devices("virtual:2");
    set_frontend(std::make_unique<Listener>());
    told.clear();
    const support::TemporaryFolder folder;
    Training training;
    for (int i = 0; i < 2; ++i) {
      training.run(1, true);
      save_checkpoint(folder.path(), training.model, training.optimizer, {.wait = true});
    }
    CHECK(latest(folder.path()) == (fs::path(folder.path()) / "step-2").string());
    {
      std::fstream file(fs::path(folder.path()) / "step-2" / "optimizer.safetensors",
                        std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(-1, std::ios::end);
      file.put('\x55');
    }
    Training resumed;
    CHECK(load_checkpoint(folder.path(), resumed.model, resumed.optimizer).step == 1);
    REQUIRE(told.size() == 1);
    CHECK(told[0].find("optimizer.safetensors") != std::string::npos);
    set_frontend(nullptr);
  }

  TEST_CASE("an error of earlier work is thrown, and no older checkpoint is loaded for it") {
    set_devices("virtual:2");
    set_frontend(std::make_unique<Listener>());
    told.clear();
    const support::TemporaryFolder folder;
    Training training;
    for (int i = 0; i < 3; ++i) {
      training.run(1, true);
      save_checkpoint(folder.path(), training.model, training.optimizer, {.wait = true});
    }
    const auto load = [&] { return load_checkpoint(folder.path(), training.model, training.optimizer).step; };
    (void)training.model.submit(at::randn({8, 5}), std::tuple<>(), [](const Tensor& out) { return out.sum() * NAN; });
    CHECK(thrown<Error>(load).find("NaN") != std::string::npos);
    CHECK(load() == 3);
    CHECK(told.empty());
    set_frontend(nullptr);
  }

  TEST_CASE("checkpoints of which none is whole are no reason to begin anew") {
    set_devices("virtual:2");
    const support::TemporaryFolder folder;
    CHECK_FALSE(latest(folder.path()));
    Training training;
    training.run(1, true);
    save_checkpoint(folder.path(), training.model, training.optimizer, {.wait = true});
    CHECK(latest(folder.path()) == (fs::path(folder.path()) / "step-1").string());
    fs::remove(fs::path(folder.path()) / "step-1" / "state.json");
    CHECK(thrown<Error>([&] { latest(folder.path()); }).find("'state.json'") != std::string::npos);
    CHECK(thrown<Error>([&] {
            load_checkpoint(folder.path(), training.model, training.optimizer);
          }).find("'state.json'") != std::string::npos);
    // What cannot be loaded may be replaced.
    CHECK(save_checkpoint(folder.path(), training.model, training.optimizer, {.wait = true}).step() == 1);
    CHECK(load_checkpoint(folder.path(), training.model, training.optimizer).step == 1);
  }

  TEST_CASE("an older checkpoint that cannot be removed is told, and the save succeeds") {
    set_devices("virtual:2");
    set_frontend(std::make_unique<Listener>());
    told.clear();
    const support::TemporaryFolder folder;
    Training training;
    for (int64_t step = 1; step <= 2; ++step) {
      training.run(1, true);
      SaveOptions options{.keep_last = 1, .wait = true};
      if (step == 2) {
        // A folder in its way, which the rename that hides a checkpoint does not replace.
        for (int number = 0; number < 8; ++number) {
          fs::create_directories(fs::path(folder.path()) / concat(".step-1.removed-", getpid(), "-", number) /
                                 "in the way");
        }
      }
      CHECK(save_checkpoint(folder.path(), training.model, training.optimizer, options).done());
    }
    CHECK(latest(folder.path()) == (fs::path(folder.path()) / "step-2").string());
    REQUIRE(told.size() == 1);
    CHECK(told[0].find("step 1 is older than what is kept and is still there") != std::string::npos);
    CHECK(told[0].find("not saved") == std::string::npos);
    set_frontend(nullptr);
  }

  TEST_CASE("what does not fit is refused, and nothing is changed") {
    set_devices("virtual:2");
    const support::TemporaryFolder folder;
    Training training;
    training.run(2, true);
    save_checkpoint(folder.path(), training.model, training.optimizer,
                    {.state = {{"tensor", at::arange(3)}, {"nothing", {}}}, .keep_last = 1, .wait = true});
    using Mistake = std::invalid_argument;
    const auto same_step = [&] { save_checkpoint(folder.path(), training.model, training.optimizer, {.wait = true}); };
    CHECK(thrown<std::exception>(same_step).find("step-2") != std::string::npos);
    CHECK(thrown<Mistake>([&] {
            save_checkpoint(folder.path(), training.model, training.optimizer, {.keep_every = 5});
          }).find("keep_last") != std::string::npos);
    CHECK(thrown<Mistake>([&] {
            save_checkpoint(folder.path(), training.model, training.optimizer, {.snapshot_memory_bytes = -1});
          }).find("snapshot_memory_bytes is -1, expected at least 0") != std::string::npos);
    CHECK(thrown<Mistake>([&] {
            save_checkpoint(folder.path(), training.model, SaveOptions{.step = 9});
          }).find("third argument") != std::string::npos);

    for (const char* const name : {"../x", "state.json", "model.safetensors", "manifest.json"}) {
      CAPTURE(name);
      CHECK_THROWS_AS(save_checkpoint(folder.path(), training.model, training.optimizer,
                                      {.step = 9, .files = {{name, "text"}}, .wait = true}),
                      Mistake);
    }

    Training other(at::kFloat, optim::Algorithm::kLion);
    const std::vector<Tensor> before = other.state();
    CHECK(thrown<Mistake>([&] { load_checkpoint(folder.path(), other.model, other.optimizer); }).find("AdamW") !=
          std::string::npos);
    GradScaler scaler;
    Training scaled;
    CHECK(thrown<Mistake>([&] {
            load_checkpoint(folder.path(), scaled.model, scaled.optimizer, {.scaler = &scaler});
          }).find("no scaler") != std::string::npos);
    Training unscheduled;
    unscheduled.optimizer.set_learning_rate(nullptr);
    CHECK(thrown<Mistake>([&] {
            load_checkpoint(folder.path(), unscheduled.model, unscheduled.optimizer);
          }).find("schedule") != std::string::npos);
    nn::Sequential narrow{nn::Linear(5, 3)};
    Model small(narrow);
    CHECK(thrown<Mistake>([&] { load_weights(folder.path(), small); }).find("lacks") != std::string::npos);
    CHECK(thrown<Error>([&] { load_weights(folder.path() + "/none", small); }).find("none") != std::string::npos);
    check_same(other.state(), before);

    const Loaded weights = load_weights(folder.path(), other.model);
    CHECK(weights.step == 2);
    check_same(other.state(), training.state());
    const Loaded loaded = load_checkpoint(folder.path(), scaled.model, scaled.optimizer);
    CHECK(at::equal(loaded.value("tensor").as_tensor(), at::arange(3)));
    CHECK(loaded.value("nothing").is_none());
    CHECK_THROWS_AS(loaded.value("tensor").as_int(), Mistake);
    CHECK_THROWS_AS(loaded.value("other"), Mistake);
  }

  TEST_CASE("objects that were moved from") {
    set_devices("virtual:2");
    const support::TemporaryFolder folder;
    Training training;
    training.run(1, false);
    Save made = save_checkpoint(folder.path(), training.model, training.optimizer);
    const Save save(std::move(made));
    const std::function<void()> of_save[] = {[&] { (void)made.step(); }, [&] { (void)made.folder(); },
                                             [&] { (void)made.done(); }, [&] { (void)made.wait(); }};
    for (const auto& use : of_save) {
      CHECK(thrown<std::invalid_argument>(use).starts_with("[save] this save was moved from"));
    }
    CHECK(save.wait().bytes > 0);
    const Model owner(std::move(training.model));
    const std::function<void()> of_model[] = {
        [&] { save_checkpoint(folder.path(), training.model, training.optimizer, {.step = 2}); },
        [&] { save_checkpoint(folder.path(), training.model, {.step = 2}); },
        [&] { load_checkpoint(folder.path(), training.model, training.optimizer); },
        [&] { load_weights(folder.path(), training.model); },
        [&] { wait_for_save(training.model); },
    };
    for (const auto& use : of_model) {
      CHECK(thrown<std::invalid_argument>(use).starts_with("[model] this model was moved from"));
    }
  }

  TEST_CASE("updates wait for the disk when the memory of a save is used up") {
    set_devices("virtual:2");
    const support::TemporaryFolder folder;
    Training training;
    training.run(3, true);
    const Save save = save_checkpoint(folder.path(), training.model, training.optimizer, {.snapshot_memory_bytes = 0});
    const std::vector<Tensor> losses = training.run(3, true);
    CHECK(save.wait().held_bytes >= 0);
    Training resumed;
    load_checkpoint(folder.path(), resumed.model, resumed.optimizer);
    check_same(resumed.run(3, true), losses);
  }

  TEST_CASE("a save outlives its model, and the next program goes on") {
    set_devices("virtual:2");
    const support::TemporaryFolder folder;
    std::optional<Save> save;
    {
      Training training;
      training.run(2, true);
      save.emplace(save_checkpoint(folder.path(), training.model, training.optimizer));
      training.run(1, true);
    }
    CHECK(save->wait().bytes > 0);
    Training resumed;
    CHECK(load_checkpoint(folder.path(), resumed.model, resumed.optimizer).step == 2);
  }

  TEST_CASE("a folder that a save makes is the same one for the next, however it is named") {
    set_devices("virtual:2");
    const support::TemporaryFolder folder;
    fs::create_directories(folder.path());
    const fs::path before = fs::current_path();
    fs::current_path(folder.path());
    Training training;
    training.run(1, true);
    for (const char* name : {"new", "newer/", "./inner/newest"}) {
      for (int64_t step = 1; step <= 2; ++step)
        save_checkpoint(name, training.model, training.optimizer, {.step = step, .wait = true});
      CHECK(latest(name));
    }
    fs::current_path(before);
  }

  TEST_CASE("frozen parameters of another folder stay out, and are compared") {
    set_devices("virtual:2");
    const support::TemporaryFolder folder;
    const auto make = [] {
      at::manual_seed(4);
      nn::Sequential layers = mlp();
      layers[0]->parameters()[0].set_requires_grad(false);
      return layers;
    };
    nn::Sequential layers = make();
    Model model(layers);
    Optimizer optimizer(model, torch::optim::SGDOptions(0.1));
    SaveOptions options{.wait = true};
    options.leaves_out = [](const std::string& name, const Tensor& /*parameter*/) { return name == "0.weight"; };
    save_checkpoint(folder.path(), model, optimizer, options);
    nn::Sequential same = make();
    Model resumed(same);
    Optimizer again(resumed, torch::optim::SGDOptions(0.1));
    CHECK(load_checkpoint(folder.path(), resumed, again).missing.empty());
    resumed.synchronize();
    {
      const at::NoGradGuard no_grad;
      same[0]->parameters()[0].fill_(1);
    }
    CHECK(thrown<std::invalid_argument>([&] { load_checkpoint(folder.path(), resumed, again); }).find("other values") !=
          std::string::npos);
  }
}
