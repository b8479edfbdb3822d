#include <roundpipe/roundpipe.h>

#include <malloc.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <thread>

#include <doctest/doctest.h>

#include <roundpipe/memory/host_arena.h>
#include <roundpipe/runtime/model_optimizer.h>

#include "support/chain.h"
#include "support/frontend.h"

using namespace roundpipe;
using namespace roundpipe::support;
namespace nn = torch::nn;

namespace {

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;

int64_t highest_peak() {
  int64_t peak = 0;
  for (const DeviceInfo& device : devices()) peak = std::max(peak, device.peak_bytes);
  return peak;
}
int64_t most_used() {
  int64_t used = 0;
  for (const DeviceInfo& device : devices()) used = std::max(used, device.used_bytes);
  return used;
}

int64_t threads() {
  namespace fs = std::filesystem;
  return std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator());
}

// Of the process, without what the allocator keeps for later.
int64_t resident_bytes() {
  malloc_trim(0);
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * 4096;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kOwnAllocator = true;  // which keeps what is freed, so resident memory tells nothing
#else
constexpr bool kOwnAllocator = false;
#endif

nn::Sequential linears(int count, int64_t width) {
  nn::Sequential layers;
  for (int l = 0; l < count; ++l) layers->push_back(nn::Linear(width, width));
  return layers;
}

constexpr int64_t kBlockWidth = 96;

// A residual MLP; over the features of the batch or, which writes buffers, over its rows.
struct WideBlockImpl : nn::Cloneable<WideBlockImpl> {
  explicit WideBlockImpl(bool batch_norm_ = false, double dropout_ = 0) : batch_norm(batch_norm_), dropout(dropout_) {
    reset();
  }
  void reset() override {
    if (batch_norm)
      rows = register_module("rows", nn::BatchNorm1d(kBlockWidth));
    else
      features = register_module("features", nn::LayerNorm(nn::LayerNormOptions({kBlockWidth})));
    up = register_module("up", nn::Linear(kBlockWidth, 4 * kBlockWidth));
    down = register_module("down", nn::Linear(4 * kBlockWidth, kBlockWidth));
    drop = register_module("drop", nn::Dropout(dropout));
  }
  Tensor forward(const Tensor& x) { return x + drop(down(torch::gelu(up(batch_norm ? rows(x) : features(x))))); }
  bool batch_norm;
  double dropout;
  nn::BatchNorm1d rows{nullptr};
  nn::LayerNorm features{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
  nn::Dropout drop{nullptr};
};
TORCH_MODULE(WideBlock);

constexpr int kBlocks = 4;
constexpr int64_t kBlockRows = 3 * 128;

struct Trained {
  std::vector<Tensor> losses, state;
  int64_t peak = 0;
};

// Four asynchronous steps over blocks that are one stage, or one stage each, or as the planner chooses.
enum class Stage { kWhole, kOne, kPlanned };
Trained train_blocks(const std::string& pool, const std::function<WideBlock()>& make, Stage stage) {
  set_devices(pool);
  at::manual_seed(1);
  nn::Sequential layers;
  for (int l = 0; l < kBlocks; ++l) layers->push_back(make());
  Model model(layers, {.name = "m"});
  Optimizer optimizer(model, torch::optim::SGDOptions(1e-3));
  RunOptions options;
  options.microbatches = 3;
  schedule::Stages stages;
  const bool one = stage == Stage::kOne;
  for (int l = kBlocks; l > 0 && one; --l) stages.backward.push_back({l - 1, l});
  if (!one) stages.backward = {{0, kBlocks}};
  for (int l = 0; l + 1 < kBlocks && one; ++l) stages.forward.push_back({l, l + 1});
  if (stage != Stage::kPlanned) options.route = stages;
  Trained trained;
  for (uint64_t step = 0; step < 4; ++step) {
    const at::Generator own = at::detail::createCPUGenerator(step);
    const Tensor inputs = at::randn({kBlockRows, kBlockWidth}, own), labels = at::randn({kBlockRows, kBlockWidth}, own);
    trained.losses.push_back(model.forward_backward(inputs, labels, squared_error, options).loss);
    model.step(optimizer);
  }
  model.synchronize();
  trained.state = copies_of(layers->parameters());
  for (const Tensor& buffer : layers->buffers()) trained.state.push_back(buffer.clone());
  trained.peak = highest_peak();
  return trained;
}

}  // namespace

TEST_SUITE("memory of devices") {
  TEST_CASE("a model of eight times the cap trains, with the plain loop's bits") {
    constexpr int64_t kWide = 256;  // a layer of 257 KiB
    for (const int count : {1, 2}) {
      for (const bool autograd : {false, true}) {
        for (const RecomputeGrain grain : {RecomputeGrain::kStage, RecomputeGrain::kLayer}) {
          CAPTURE(count);
          CAPTURE(autograd);
          set_devices(concat("virtual:", count, ",memory=1MiB,debug"));
          at::manual_seed(2);
          nn::Sequential layers = linears(33, kWide), plain = twin_of(layers);
          Model model(layers);
          model.run_options().microbatches = 2;
          model.run_options().recompute_grain = grain;
          torch::optim::SGD ours(layers->parameters(), 1e-3), theirs(plain->parameters(), 1e-3);
          const PlainStep reference{bodies(plain), squared_error, plain->parameters()};
          for (int step = 0; step < 2; ++step) {
            const Tensor inputs = at::randn({4, kWide}), labels = at::randn({4, kWide});
            const uint64_t call = model.calls();
            if (autograd) {
              squared_error(model.forward(inputs), labels).backward();
            } else {
              model.forward_backward(inputs, labels, squared_error);
            }
            reference.run(model, call, inputs, labels, 2);
            model.step(ours);
            theirs.step();
            theirs.zero_grad();
          }
          CHECK(highest_peak() > 0);
          CHECK(highest_peak() <= kMiB);
          CHECK(same_state(layers->parameters(), plain->parameters()));
        }
      }
    }
  }

  TEST_CASE("a batch that does not fit is refused, and a smaller one fits") {
    set_devices("virtual:2,memory=1MiB");
    nn::Sequential layers = linears(4, 64);
    Model model(layers);
    model.run_options().microbatches = 2;
    const auto sum = [](const Tensor& outputs) { return outputs.sum(); };
    for (int round = 0; round < 3; ++round) {
      CHECK_THROWS_WITH_AS(model.forward_backward(at::randn({20'000, 64}), std::tuple<>(), sum),
                           doctest::Contains("whose cap is 1.00 MiB"), c10::OutOfMemoryError);
      CHECK_THROWS_AS(model.submit(at::randn({20'000, 64}), std::tuple<>(), sum).finish(), c10::OutOfMemoryError);
      CHECK_THROWS_AS(model.forward(at::randn({20'000, 64})), c10::OutOfMemoryError);
      CHECK(model.forward_backward(at::randn({200, 64}), std::tuple<>(), sum).loss.isfinite().item<bool>());
      model.synchronize();
    }
    CHECK(highest_peak() <= kMiB);
  }

  TEST_CASE("a layer that does not fit is refused by name") {
    set_devices("virtual:2,memory=256KiB");
    nn::Sequential layers(nn::Linear(8, 8), nn::Linear(8, 40'000), nn::Linear(40'000, 8));
    Model model(layers, {.name = "wide"});
    for (int round = 0; round < 2; ++round) {
      CHECK_THROWS_WITH_AS(model.forward(at::randn({4, 8})), doctest::Contains("there was no room for the weights of"),
                           c10::OutOfMemoryError);
    }
    nn::Sequential narrow(nn::Linear(8, 8));
    Model other(narrow, {.name = "narrow"});
    CHECK(other.forward(at::randn({4, 8})).sizes() == at::IntArrayRef({4, 8}));
  }

  TEST_CASE("a stage that does not fit runs layer by layer with the same bits, and the user is told once") {
    const std::vector<std::function<WideBlock()>> kinds = {[] { return WideBlock(); }, [] { return WideBlock(true); },
                                                           [] { return WideBlock(false, 0.2); }};
    for (const auto& make : kinds) {
      for (const int count : {1, 2}) {
        const Trained ample = train_blocks(concat("virtual:", count), make, Stage::kWhole);
        const int64_t cap = ample.peak * 3 / 4;
        Trained tight;
        const std::vector<std::string> notices = test_frontend.notices_of(
            [&] { tight = train_blocks(concat("virtual:", count, ",memory=", cap, "B,debug"), make, Stage::kWhole); });
        CHECK(same_state(tight.losses, ample.losses));
        CHECK(same_state(tight.state, ample.state));
        CHECK(tight.peak <= cap);
        REQUIRE(notices.size() == 1);
        CHECK(notices[0].find("of layers 0 to 3 of m in call 0; going on layer by layer") != std::string::npos);
      }
    }
    CHECK(test_frontend.notices_of([&] { train_blocks("virtual:2,memory=1GiB", kinds[0], Stage::kWhole); }).empty());
  }

  TEST_CASE("steps are planned within what devices have, without a retry and with the same bits") {
    const auto make = [] { return WideBlock(false, 0.2); };
    for (const int count : {1, 2}) {
      const Trained ample = train_blocks(concat("virtual:", count), make, Stage::kWhole);
      for (const int64_t percent : {70, 85, 150}) {
        CAPTURE(count);
        CAPTURE(percent);
        const int64_t cap = ample.peak * percent / 100;
        Trained tight;
        const std::vector<std::string> notices = test_frontend.notices_of(
            [&] { tight = train_blocks(concat("virtual:", count, ",memory=", cap, "B"), make, Stage::kPlanned); });
        CHECK(notices.empty());
        CHECK(same_state(tight.losses, ample.losses));
        CHECK(same_state(tight.state, ample.state));
        CHECK(tight.peak <= cap);
      }
    }
  }

  TEST_CASE("only the first step of a kind and larger ones are measured, if at all") {
    struct Limit {
      bool measures = true;
      std::optional<int64_t> budget = std::nullopt;
    };
    for (const auto& [measures, budget] : {Limit{}, Limit{false}, Limit{true, 64 * kMiB}}) {
      for (const bool autograd : {true, false}) {
        CAPTURE(measures);
        CAPTURE(budget.has_value());
        CAPTURE(autograd);
        set_devices("virtual:2,memory=64MiB");
        at::manual_seed(1);
        const Tensor weight = at::randn({8, 8}).set_requires_grad(true);
        std::mutex mutex;
        std::set<std::thread::id> threads;
        const auto multiply = [&](const std::vector<Tensor>& own, const Tensor& x) {
          const std::lock_guard lock(mutex);
          threads.insert(std::this_thread::get_id());
          return at::matmul(x, own[0]);
        };
        Model model({layer({{"weight", weight}}, multiply), layer(nn::Linear(8, 8))},
                    {.device_memory = budget, .measure_steps = measures});
        model.run_options().loss_reduction = LossReduction::kMean;
        model.run_options().microbatches = 2;
        std::vector<int64_t> measured;
        for (const int64_t rows : {8, 4, 8, 16, 12, 16}) {
          threads.clear();
          const Tensor inputs = at::randn({rows, 8}), labels = at::randn({rows, 8});
          if (autograd) {
            squared_error(model.forward(inputs), labels).backward();
          } else {
            model.forward_backward(inputs, labels, squared_error);
          }
          model.synchronize();
          if (threads.contains(std::this_thread::get_id())) measured.push_back(rows);
        }
        CHECK(measured == (measures ? std::vector<int64_t>{8, 16} : std::vector<int64_t>{}));
      }
    }
  }

  TEST_CASE("what is released in debug mode reads as NaN") {
    for (const int count : {1, 2}) {
      set_devices(concat("virtual:", count, ",debug"));
      std::vector<Tensor> stash;
      std::mutex mutex;
      const Tensor weight = at::ones({8, 8}).set_requires_grad(true);
      const auto keeps = [&](const std::vector<Tensor>& own, const Tensor& x) {
        const std::lock_guard lock(mutex);
        stash.push_back(own[0].detach());
        return at::matmul(x, own[0]);
      };
      Model model({layer({{"weight", weight}}, keeps), layer(nn::Linear(8, 8))});
      model.forward_backward(at::randn({4, 8}), std::tuple<>(), [](const Tensor& outputs) { return outputs.sum(); });
      model.synchronize();
      CHECK_FALSE(stash.empty());
      for (const Tensor& tensor : stash) CHECK(tensor.isnan().all().item<bool>());
      CHECK(weight.eq(1).all().item<bool>());
    }
  }
}

TEST_SUITE("predicted memory") {
  TEST_CASE("the peak is as predicted") {
    for (const bool batch_norm : {false, true}) {
      for (const int microbatches : {1, 3}) {
        CAPTURE(batch_norm);
        CAPTURE(microbatches);
        set_devices("virtual:1");
        at::manual_seed(3);
        nn::Sequential layers;
        for (int l = 0; l < kBlocks; ++l) layers->push_back(WideBlock(batch_norm));
        Model model(layers);
        Optimizer optimizer(model, torch::optim::SGDOptions(1e-4));
        model.run_options().microbatches = microbatches;
        const Tensor inputs = at::randn({kBlockRows, kBlockWidth}), labels = at::randn({kBlockRows, kBlockWidth});
        const MemoryPrediction predicted = model.predict_memory(inputs, labels, squared_error);
        for (int step = 0; step < 3; ++step) {
          model.forward_backward(inputs, labels, squared_error);
          model.step(optimizer);
        }
        model.synchronize();
        const double ratio = static_cast<double>(predicted.device.total()) / static_cast<double>(highest_peak());
        CAPTURE(ratio);
        CHECK(ratio > 0.97);
        CHECK(ratio < 1.06);
        const auto host =
            static_cast<double>(optimizer.core()->host_bytes(optimizer.all_options()).weights_and_gradients);
        CHECK(static_cast<double>(predicted.host.weights + predicted.host.gradients) / host > 0.99);
      }
    }
  }

  TEST_CASE("a budget of devices is kept, and what cannot fit is refused with what would") {
    const Tensor inputs = at::randn({kBlockRows, kBlockWidth}), labels = at::randn({kBlockRows, kBlockWidth});
    const auto made = [&](std::optional<int64_t> device_memory) {
      at::manual_seed(3);
      nn::Sequential layers;
      for (int l = 0; l < kBlocks; ++l) layers->push_back(WideBlock(false));
      return Model(layers, {.run = {.microbatches = 2}, .device_memory = device_memory});
    };
    set_devices("virtual:1");
    const int64_t ample = made(std::nullopt).predict_memory(inputs, labels, squared_error).device.needed();
    for (const double share : {2.0, 0.6}) {
      CAPTURE(share);
      set_devices("virtual:1");
      const auto budget = static_cast<int64_t>(share * static_cast<double>(ample));
      Model model = made(budget);
      for (int step = 0; step < 3; ++step) model.forward_backward(inputs, labels, squared_error);
      model.synchronize();
      CHECK(highest_peak() <= budget);
    }
    set_devices("virtual:1");
    Model model = made(ample / 6);
    CHECK_THROWS_WITH_AS(model.forward_backward(inputs, labels, squared_error),
                         doctest::Contains("smallest change that would fit: "), BudgetExceeded);
    model.run_options().microbatches = 1;
    CHECK_THROWS_WITH_AS(model.forward_backward(inputs, labels, squared_error),
                         doctest::Contains("[RoundPipe] a step of Sequential does not fit on a device:"),
                         BudgetExceeded);
  }

  TEST_CASE("a call without a backward keeps to a budget of devices that is less than the weights") {
    const at::NoGradGuard no_grad;
    const Tensor inputs = at::randn({8, kBlockWidth});
    constexpr int kLayers = 12;
    const auto run = [&](std::optional<int64_t> device_memory) {
      set_devices("virtual:1");
      at::manual_seed(3);
      nn::Sequential layers;
      for (int l = 0; l < kLayers; ++l) layers->push_back(WideBlock(false));
      Model model(layers, {.run = {.microbatches = 1}, .device_memory = device_memory});
      std::vector<Tensor> outputs;
      for (int call = 0; call < 4; ++call) outputs.push_back(model.forward(inputs).clone());
      model.synchronize();
      return std::pair(outputs, highest_peak());
    };
    const auto [expected, ample] = run(std::nullopt);
    const int64_t budget = ample / 3;
    const auto [outputs, held] = run(budget);
    CHECK(held <= budget);
    for (size_t call = 0; call < expected.size(); ++call) CHECK(at::equal(outputs[call], expected[call]));
  }

  TEST_CASE("a budget of the host is kept before anything is allocated") {
    const auto layers = nn::Sequential(nn::Linear(64, 64), nn::Linear(64, 64));
    constexpr int64_t kWeights = 2 * (64 * 64 + 64) * 4;
    CHECK_THROWS_WITH_AS(Model(layers, {.host_memory = kWeights}),
                         doctest::Contains("smallest change that would fit: train adapters only"), BudgetExceeded);
    Model model(layers, {.host_memory = 3 * kWeights});
    CHECK_THROWS_WITH_AS(Optimizer(model, torch::optim::AdamWOptions(1e-3)),
                         doctest::Contains("smallest change that would fit: moments = 8bit in the optimizer"),
                         BudgetExceeded);
    CHECK_NOTHROW(Optimizer(model, optim::Algorithm::kAdamW, {}, {.moments = optim::MomentFormat::kBlockwise8Bit}));
  }

  TEST_CASE("narrower formats are tried in an order that changes least first") {
    using Ways = std::vector<std::string>;
    const auto ways = [](OptimizerMemory optimizer, Steps steps) {
      Ways said;
      for (const NarrowerOptimizer& way : narrower_formats(optimizer, steps)) {
        std::string& text = said.emplace_back();
        for (const auto& [option, value] : way.changes) text += concat(text.empty() ? "" : " ", value);
        CHECK(way.optimizer.gradients_at_once == (text.starts_with("at_once") || optimizer.gradients_at_once));
      }
      return said;
    };
    OptimizerMemory adamw{.algorithm = optim::Algorithm::kAdamW};
    CHECK(ways(adamw, Steps::kSynchronous) ==
          Ways{"at_once", "8bit", "at_once 8bit", "8bit 24bit", "at_once 8bit 24bit"});
    CHECK(ways(adamw, Steps::kUnknown) == Ways{"8bit", "8bit 24bit", "at_once", "at_once 8bit", "at_once 8bit 24bit"});
    CHECK(ways(adamw, Steps::kAsynchronous) == Ways{"8bit", "8bit 24bit"});
    adamw.gradients_at_once = true;
    CHECK(ways(adamw, Steps::kSynchronous) == Ways{"8bit", "8bit 24bit"});
    CHECK(ways({.algorithm = optim::Algorithm::kMuon}, Steps::kSynchronous) ==
          Ways{"at_once", "24bit", "at_once 24bit"});
    // Masters of 24 bits are those of bf16 weights alone.
    CHECK(narrower_formats(adamw, Steps::kAsynchronous, at::kBFloat16).size() == 2);
    for (const auto dtype : {at::kFloat, at::kHalf})
      CHECK(narrower_formats(adamw, Steps::kAsynchronous, dtype).size() == 1);
    adamw.gradients_at_once = false;
    CHECK(narrower_formats(adamw, Steps::kSynchronous, at::kFloat).size() == 3);
    // The losses of fp16 are scaled.
    CHECK(narrower_formats(adamw, Steps::kSynchronous, at::kHalf).size() == 1);
  }

  TEST_CASE("a device without memory for a step says what would fit") {
    set_devices("virtual:1");
    at::manual_seed(3);
    nn::Sequential layers;
    for (int l = 0; l < kBlocks; ++l) layers->push_back(WideBlock(false));
    Model model(layers, {.run = {.microbatches = 1}, .measure_steps = false});
    const Tensor inputs = at::randn({kBlockRows, kBlockWidth}), labels = at::randn({kBlockRows, kBlockWidth});
    const int64_t needed = model.predict_memory(inputs, labels, squared_error).device.needed();
    set_devices(concat("virtual:1,memory=", needed / 3, "B"));
    try {
      model.forward_backward(inputs, labels, squared_error);
      model.synchronize();
      FAIL("the step does not fit");
    } catch (const c10::OutOfMemoryError& error) {
      const std::string said = error.what();
      CAPTURE(said);
      CHECK(said.find("layer by layer, a step of Sequential is predicted to take") != std::string::npos);
      CHECK(said.find("smallest change that would fit: ") != std::string::npos);
    }
  }

  TEST_CASE("what is kept for failures is predicted") {
    set_devices("virtual:2");
    const auto kept = [](bool tolerant, int every) {
      Duel duel;
      duel.model.run_options().fault_tolerant = tolerant;
      duel.model.run_options().verify_every = every;
      const Sample batch = sample(0);
      return duel.model.predict_memory(batch.inputs, batch.labels, squared_error).host.kept_for_failures;
    };
    CHECK(kept(false, 0) == 0);
    CHECK(kept(true, 0) > 0);
    CHECK(kept(false, 2) > 0);
    CHECK(kept(true, 2) == kept(true, 0) + kept(false, 2));
  }

  TEST_CASE("predicting changes nothing") {
    set_devices("virtual:2");
    at::manual_seed(4);
    Duel duel;
    const std::vector<Tensor> before = duel.state();
    const Tensor random = at::detail::getDefaultCPUGenerator().get_state();
    const Sample batch = sample(0);
    duel.model.predict_memory(batch.inputs, batch.labels, squared_error);
    CHECK(at::equal(random, at::detail::getDefaultCPUGenerator().get_state()));
    CHECK(same_state(duel.state(), before));
    for (const Tensor& parameter : duel.chain.parameters()) CHECK_FALSE(parameter.grad().defined());
    Duel other;
    other.chain.trap->throw_from(1);
    CHECK_THROWS_AS(other.model.predict_memory(batch.inputs, batch.labels, squared_error), OnPurpose);
    other.chain.trap->clear();
    CHECK(other.goes_on());
  }
}

TEST_SUITE("memory of the host") {
  TEST_CASE("nothing grows with the steps") {
    for (const bool fused : {false, true}) {
      CAPTURE(fused);
      set_devices("virtual:2,memory=16MiB");
      at::manual_seed(5);
      Duel duel(/*asynchronous=*/true);
      duel.model.run_options().route = schedule::Stages{{{0, 3}}, {{3, 6}, {0, 3}}};
      duel.sgd = std::make_unique<Optimizer>(duel.model, PlainTraining::rule());
      const Sample batch = sample(0);
      const auto train = [&](int steps) {
        for (int step = 0; step < steps; ++step) {
          if (fused) {
            duel.model.forward_backward(batch.inputs, batch.labels, squared_error);
          } else {
            squared_error(duel.model.forward(batch.inputs), batch.labels).backward();
          }
          duel.model.step(*duel.sgd);
        }
        duel.model.synchronize();
      };
      // A model whose stages are given: two of forward and backward apart.
      if (!fused) duel.model.run_options().route = schedule::Stages{{{0, 3}, {3, 6}}, {{3, 6}, {0, 3}}};
      train(100);
      const int64_t device = most_used(), thread_count = threads(), resident = resident_bytes();
      const auto arena = memory::HostArena::pageable().stats(), values = memory::HostArena::values(false).stats();
      train(200);
      CHECK(most_used() <= device + 4 * kKiB);
      CHECK(threads() <= thread_count);  // fewer, when the devices of an earlier test end meanwhile
      CHECK(memory::HostArena::pageable().stats().asked_bytes <= arena.asked_bytes);
      CHECK(memory::HostArena::values(false).stats().asked_bytes <= values.asked_bytes);
      CHECK((kOwnAllocator || resident_bytes() - resident < 4 * kMiB));
    }
  }

  TEST_CASE("failing calls do not pile up") {
    set_devices("virtual:2,memory=16MiB");
    at::manual_seed(6);
    Duel duel;
    const auto rounds = [&](int count) {
      for (int round = 0; round < count; ++round) {
        duel.chain.trap->throw_from(1 + round % 3);
        CHECK_THROWS_AS(duel.call_alone(), OnPurpose);
        duel.chain.trap->clear();
        duel.call_alone();
        duel.model.zero_grad();
      }
    };
    rounds(10);
    const int64_t device = most_used(), thread_count = threads();
    const auto arena = memory::HostArena::pageable().stats(), values = memory::HostArena::values(false).stats();
    rounds(40);
    CHECK(most_used() <= device + 4 * kKiB);
    CHECK(threads() <= thread_count);
    CHECK(memory::HostArena::pageable().stats().asked_bytes <= arena.asked_bytes);
    CHECK(memory::HostArena::values(false).stats().asked_bytes <= values.asked_bytes);
  }

  TEST_CASE("steps of the same shapes take no new memory, and a model that goes gives back its own") {
    set_devices("virtual:2");
    at::manual_seed(7);
    const auto arena = [] { return memory::HostArena::pageable().stats(); };
    const auto values = [] { return memory::HostArena::values(false).stats(); };
    const int64_t before = arena().asked_bytes, values_before = values().asked_bytes;
    {
      nn::Sequential layers = linears(6, 64);
      Model model(layers);
      Optimizer optimizer(model, torch::optim::AdamWOptions(1e-3));
      model.run_options().microbatches = 4;
      model.run_options().route = schedule::Stages{{{0, 2}, {2, 4}}, {{4, 6}, {2, 4}, {0, 2}}};
      const auto train = [&](int64_t rows) {
        const Tensor inputs = at::randn({rows, 64});
        for (int step = 0; step < 3; ++step) {
          model.forward_backward(inputs, inputs, squared_error);
          model.step(optimizer);
        }
        model.synchronize();
        return values().reserved_bytes;
      };
      const int64_t first = train(4096), batch_bytes = 4096 * 64 * 4;
      CHECK(first > 3 * batch_bytes);
      // How much is in use at once depends a little on timing.
      for (const int64_t rows : {4096, 4096, 64}) CHECK(train(rows) <= first + 6 * batch_bytes);
      const auto host = optimizer.core()->host_bytes(optimizer.all_options());
      CHECK(arena().asked_bytes - before >= host.weights_and_gradients + host.moments);
    }
    set_devices("virtual:1");  // the old devices' threads let go of a finished call a moment later
    CHECK(arena().asked_bytes <= before);
    CHECK(values().asked_bytes <= values_before);
  }

  TEST_CASE("models that come and go leave nothing, though they still run when they are dropped") {
    set_devices("virtual:2,memory=64MiB");
    const auto sum = [](const Tensor& outputs) { return outputs.sum(); };
    const Tensor inputs = at::randn({8, 256});
    std::vector<std::weak_ptr<nn::SequentialImpl>> dropped;
    const int64_t before = memory::HostArena::pageable().stats().asked_bytes;
    int64_t resident = 0;
    for (int round = 0; round < 40; ++round) {
      nn::Sequential layers = linears(4, 256);
      Model model(layers);
      Optimizer optimizer(model, torch::optim::SGDOptions(1e-3));
      model.forward_backward(inputs, std::tuple<>(), sum);
      model.step(optimizer);
      model.submit(inputs, std::tuple<>(), sum);
      dropped.push_back(layers.ptr());
      if (round == 20) resident = resident_bytes();
    }
    CHECK((kOwnAllocator || resident_bytes() - resident < 16 * kMiB));
    set_devices("virtual:1");
    for (const auto& old : dropped) CHECK(old.expired());
    CHECK(memory::HostArena::pageable().stats().asked_bytes <= before);
  }

  TEST_CASE("no memory left on the host is said in words") {
    set_devices("virtual:1");
    const Tensor endless = at::zeros({1}).expand({int64_t{1} << 24, int64_t{1} << 32});
    const auto take = [&] {
      const auto sums = [](const std::vector<Tensor>& own, const Tensor& x) { return x + own[0].sum(); };
      Model model({layer({{"weight", endless}}, sums)});
    };
    CHECK_THROWS_WITH_AS(take(), doctest::Contains("the system has no"), std::bad_alloc);
  }
}
