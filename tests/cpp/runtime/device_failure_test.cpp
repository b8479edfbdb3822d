#include <string>
#include <thread>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>

#include "support/model.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;
using roundpipe::DeviceError;
namespace memory = roundpipe::memory;

namespace device_failure_test {

constexpr int64_t kWidth = 4;
constexpr int64_t kRows = 3;
constexpr int kMicrobatches = 3;

RunOptions tolerant(int groups = 1) {
  RunOptions options;
  options.fault_tolerant = true;
  options.gradient_groups = groups;
  return options;
}

Pipeline::TrainResult train(PipedModel& piped, const Batch& batch, const RunOptions& options) {
  return piped.pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(), false,
                                           along(fused_stages({0, 1, 3, 4, 6}), options));
}

struct Run {
  std::vector<std::vector<Tensors>> losses;
  Tensors state;
};

bool same(const Run& a, const Run& b) {
  bool same = a.losses.size() == b.losses.size() && same_bits(a.state, b.state);
  for (size_t step = 0; same && step < a.losses.size(); ++step) {
    for (size_t m = 0; same && m < a.losses[step].size(); ++m) same = same_bits(a.losses[step][m], b.losses[step][m]);
  }
  return same;
}

struct Kind {
  bool fused = true;
  bool asynchronous = true;
  int groups = 1;
};

// Four steps of two batches each, on the current devices.
Run train_steps(const Kind& kind) {
  PipedModel piped("m", all_kinds(kWidth), kind.fused);
  Run run;
  for (int step = 0; step < 4; ++step) {
    for (int part = 0; part < 2; ++part) {
      at::manual_seed(100 + 2 * step + part);
      run.losses.push_back(train(piped, make_batch(kMicrobatches, kRows, kWidth), tolerant(kind.groups)).losses);
    }
    piped.step(0.05, kind.asynchronous);
  }
  piped.synchronize();
  for (const LayerSpec& layer : piped.layers()) {
    for (const memory::NamedTensor& parameter : layer.parameters)
      run.state.push_back(parameter.tensor.detach().clone());
    for (const memory::NamedTensor& buffer : layer.buffers) run.state.push_back(buffer.tensor.clone());
  }
  return run;
}

const std::vector<Kind> kKinds = {{true, true}, {true, false}, {false, true}, {true, true, kMicrobatches}};

TEST_SUITE("device failures") {
  TEST_CASE("a fault tolerant training goes on with the same bits, whenever a device fails") {
    for (const Kind& kind : kKinds) {
      use_devices("virtual:3");
      const Run expected = train_steps(kind);
      for (int at = 1; at <= 40; at += 6) {
        CAPTURE(at);
        const auto engine = use_devices("virtual:3,fail=1:error@" + std::to_string(at));
        CHECK(same(train_steps(kind), expected));
        engine->see_to_failures();
        CHECK(engine->size() == 2);
        REQUIRE(engine->failed().size() == 1);
        CHECK(engine->failed().front().name == "virtual:1");
      }
    }
  }

  TEST_CASE("an inference goes on, too") {
    const std::vector<LayerSpec> layers = all_kinds(kWidth);
    const Batch batch = make_batch(kMicrobatches, kRows, kWidth);
    RunOptions options = tolerant();
    options.requires_grad = false;
    std::vector<Values> expected;
    for (int at = 0; at <= 8; ++at) {
      use_devices(at == 0 ? "virtual:2" : "virtual:2,fail=1:error@" + std::to_string(at));
      PipedModel piped("m", all_kinds(kWidth));
      std::vector<Values> outputs;
      for (int round = 0; round < 2; ++round) {
        roundpipe::schedule::Stages stages;
        stages.forward = ascending({0, 2, 3, 5, 6});
        outputs = piped.pipeline().forward(batch.inputs, along(stages, options)).microbatches;
      }
      if (at == 0) expected = outputs;
      for (size_t m = 0; m < outputs.size(); ++m) {
        CHECK(same_bits(outputs[m].tensors[0], expected[m].tensors[0]));
      }
    }
  }

  TEST_CASE("an error of a layer is no failure of its device") {
    const auto engine = use_devices("virtual:2");
    std::vector<LayerSpec> layers = all_kinds(kWidth);
    const auto fault = std::make_shared<Fault>();
    layers[3].body = [fault, body = layers[3].body](Tensors inputs, const Tensors& parameters, const Tensors& buffers,
                                                    const LayerContext& context) {
      fault->pass("layer");
      return body(std::move(inputs), parameters, buffers, context);
    };
    PipedModel piped("m", layers);
    const Batch batch = make_batch(kMicrobatches, kRows, kWidth);
    fault->arm(2);
    CHECK_THROWS_AS(train(piped, batch, tolerant()), InjectedFault);
    CHECK_NOTHROW(train(piped, batch, tolerant()));
    piped.synchronize();
    CHECK(engine->size() == 2);
  }
}

}  // namespace device_failure_test
