#include <roundpipe/runtime/call/job_check.h>

#include <atomic>
#include <string>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>

#include "support/model.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;
namespace memory = roundpipe::memory;

namespace job_check_test {

constexpr int64_t kWidth = 4;
constexpr int kMicrobatches = 3;

RunOptions checked(int every, int groups = 1) {
  RunOptions options;
  options.verify_every = every;
  options.gradient_groups = groups;
  return options;
}

Pipeline::TrainResult train(PipedModel& piped, const RunOptions& options) {
  const Batch batch = make_batch(kMicrobatches, 3, kWidth);
  return piped.pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(), false,
                                           along(fused_stages({0, 1, 3, 4, 6}), options));
}

// Four steps of two batches each: losses, then weights and buffers.
Tensors train_steps(PipedModel& piped, const RunOptions& options, bool asynchronous) {
  Tensors seen;
  for (int step = 0; step < 4; ++step) {
    for (int part = 0; part < 2; ++part) {
      at::manual_seed(100 + 2 * step + part);
      for (const Tensors& losses : train(piped, options).losses) seen.insert(seen.end(), losses.begin(), losses.end());
    }
    piped.step(0.05, asynchronous);
  }
  piped.synchronize();
  for (const LayerSpec& layer : piped.layers()) {
    for (const auto* tensors : {&layer.parameters, &layer.buffers}) {
      for (const memory::NamedTensor& each : *tensors) seen.push_back(each.tensor.detach().clone());
    }
  }
  return seen;
}

// The message of the error that training ends with.
std::string error_of(PipedModel& piped, const RunOptions& options) {
  try {
    for (int call = 0; call < 20; ++call) train(piped, options);
    piped.pipeline().drain();
  } catch (const roundpipe::Error& error) {
    return error.what();
  }
  return "";
}

TEST_SUITE("job check") {
  TEST_CASE("checks change no bit, and sound devices agree, whatever the layers do") {
    for (const int devices : {1, 2, 3}) {
      for (const int groups : {1, kMicrobatches}) {
        for (const bool fused : {true, false}) {
          CAPTURE(devices);
          CAPTURE(groups);
          CAPTURE(fused);
          use_devices("virtual:" + std::to_string(devices));
          PipedModel plain("m", all_kinds(kWidth), fused), piped("m", all_kinds(kWidth), fused),
              seldom("m", all_kinds(kWidth), fused);
          const Tensors expected = train_steps(plain, checked(0, groups), fused);
          CHECK(same_bits(train_steps(piped, checked(1, groups), fused), expected));
          CHECK(piped.pipeline().model().verified_jobs.load() == 8);
          CHECK(same_bits(train_steps(seldom, checked(3, groups), fused), expected));
          CHECK(seldom.pipeline().model().verified_jobs.load() == 2);
          CHECK(plain.pipeline().model().verified_jobs.load() == 0);
        }
      }
    }
  }

  TEST_CASE("a device that changes bits is named and taken out, and training can go on without it") {
    for (const int devices : {2, 3, 4}) {
      for (int wrong = 0; wrong < devices; ++wrong) {
        CAPTURE(devices);
        CAPTURE(wrong);
        const std::string name = "virtual:" + std::to_string(wrong);
        const auto engine =
            use_devices("virtual:" + std::to_string(devices) + ",fail=" + std::to_string(wrong) + ":bits@4");
        PipedModel piped("m", all_kinds(kWidth), true);
        const std::string error = error_of(piped, checked(1));
        CHECK(error.find("[" + name + "] the device failed: it computes or copies wrong bits") == 0);
        CHECK(error.find("go back to a checkpoint") != std::string::npos);
        REQUIRE(engine->failed().size() == 1);
        CHECK(engine->failed().front().name == name);
        CHECK(error_of(piped, checked(1)) == "");
      }
    }
  }

  TEST_CASE("with fault tolerance, too") {
    const auto engine = use_devices("virtual:3,fail=1:bits@4");
    PipedModel piped("m", all_kinds(kWidth), true);
    RunOptions options = checked(1);
    options.fault_tolerant = true;
    CHECK(error_of(piped, options).find("[virtual:1] the device failed: it computes") == 0);
    CHECK(engine->failed().size() == 1);
  }

  TEST_CASE("a device that fails while a job is checked makes nothing wrong") {
    use_devices("virtual:3");
    PipedModel plain("m", all_kinds(kWidth), true);
    RunOptions options = checked(1);
    options.fault_tolerant = true;
    const Tensors expected = train_steps(plain, options, true);
    for (int at = 1; at <= 25; at += 4) {
      CAPTURE(at);
      const auto engine = use_devices("virtual:3,fail=1:error@" + std::to_string(at));
      PipedModel piped("m", all_kinds(kWidth), true);
      CHECK(same_bits(train_steps(piped, options, true), expected));
      engine->see_to_failures();
      CHECK(engine->size() == 2);
    }
  }

  TEST_CASE("no device is blamed for a layer that has other bits each time") {
    for (const char* devices : {"virtual:1", "virtual:3"}) {
      const auto engine = use_devices(devices);
      std::vector<LayerSpec> layers = all_kinds(kWidth);
      LayerSpec drifting("g");
      drifting.body = [count = std::make_shared<std::atomic<int>>(0)](Tensors inputs, const Tensors&, const Tensors&,
                                                                      const LayerContext&) {
        inputs[0] = inputs[0] + static_cast<double>(++*count);
        return inputs;
      };
      layers[4] = drifting;
      PipedModel piped("m", layers, true);
      const std::string error = error_of(piped, checked(1));
      CHECK(error.find("[verify] the ") == 0);
      CHECK(error.find("deterministic") != std::string::npos);
      CHECK(engine->failed().empty());
    }
  }

  TEST_CASE("an error of a layer in the run that checks is an error of the call") {
    use_devices("virtual:2");
    std::vector<LayerSpec> layers = all_kinds(kWidth);
    layers[3].body = [body = layers[3].body, count = std::make_shared<std::atomic<int>>(0)](
                         Tensors inputs, const Tensors& parameters, const Tensors& buffers,
                         const LayerContext& context) {
      if (++*count == 9) throw roundpipe::Error("the layer's own");
      return body(std::move(inputs), parameters, buffers, context);
    };
    PipedModel piped("m", layers, true);
    CHECK(error_of(piped, checked(1)) == "the layer's own");
    CHECK(error_of(piped, checked(1)) == "");
  }

  TEST_CASE("checksums tell values apart, not layouts") {
    const at::Tensor value = at::arange(6, at::kFloat).view({2, 3});
    CHECK(checksum_of({value}) == checksum_of({value.t().contiguous().t()}));
    CHECK(checksum_of({value}) != checksum_of({value + 1}));
    CHECK(checksum_of({value, at::Tensor()}) != checksum_of({value}));
    CHECK(checksum_of({at::Tensor(), value}) != checksum_of({value, at::Tensor()}));
  }
}

}  // namespace job_check_test
