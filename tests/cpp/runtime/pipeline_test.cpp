#include <roundpipe/runtime/pipeline.h>

#include <atomic>
#include <chrono>
#include <thread>

#include <doctest/doctest.h>

#include <roundpipe/core/frontend.h>

#include "support/model.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;

namespace pipeline_test {

constexpr int64_t kRows = 3;
constexpr int64_t kWidth = 4;

std::vector<LayerSpec> every_kind() {
  std::vector<LayerSpec> layers;
  layers.push_back(linear_layer("first", kWidth));
  layers.push_back(norm_layer("norm", kWidth));
  layers.push_back(dropout_layer("dropout"));
  layers.push_back(mask_layer("mask"));
  layers.push_back(inplace_layer("inplace"));
  layers.push_back(shift_layer("shift", kWidth));
  layers.push_back(tied_layer("tied", layers.front().parameters[0].tensor));
  return layers;
}

bool same_losses(const std::vector<Tensors>& a, const std::vector<Tensors>& b) {
  if (a.size() != b.size()) return false;
  for (size_t m = 0; m < a.size(); ++m) {
    if (a[m].size() != b[m].size()) return false;
    for (size_t i = 0; i < a[m].size(); ++i) {
      if (!same_bits(a[m][i], b[m][i])) return false;
    }
  }
  return true;
}

TEST_SUITE("pipeline") {
  TEST_CASE("a loss outside of the pipeline goes back through the graph, twice if it is kept") {
    at::manual_seed(2);
    use_devices("virtual:2,debug");
    const auto layers = every_kind();
    PlainModel plain("m", layers);
    PipedModel piped("m", layers);
    for (const bool twice : {false, true, true}) {
      const Batch batch = make_batch(2, kRows, kWidth);
      const uint64_t call = piped.pipeline().calls();
      auto outputs = piped.pipeline().forward(batch.inputs, along(train_stages({0, 3, 7})));
      at::Tensor total, plain_total;
      for (size_t m = 0; m < batch.inputs.size(); ++m) {
        const at::Tensor expected = plain.forward(batch.inputs[m].tensors, call, static_cast<int>(m))[0];
        const at::Tensor got = outputs.microbatches[m].tensors[0];
        CHECK(same_bits(got, expected));
        total = total.defined() ? total + got.square().sum() : got.square().sum();
        plain_total = plain_total.defined() ? plain_total + expected.square().sum() : expected.square().sum();
      }
      torch::autograd::backward({total}, {}, /*retain_graph=*/twice);
      torch::autograd::backward({plain_total}, {}, /*retain_graph=*/twice);
      if (twice) {
        // While the first backward may still be running.
        torch::autograd::backward({total}, {});
        torch::autograd::backward({plain_total}, {});
      }
      CHECK_THROWS(torch::autograd::backward({total}, {}));
      plain.gather();
    }
    piped.synchronize();
    CHECK(piped.layers()[1].buffers[2].tensor.item<int64_t>() == plain.buffers(1)[2].item<int64_t>());
    // Several microbatches meet at one node of the plain graph, where the sums may be made in another order.
    for (size_t l = 0; l < layers.size(); ++l) {
      for (size_t i = 0; i < layers[l].parameters.size(); ++i) {
        CHECK(at::allclose(layers[l].parameters[i].tensor.grad(), plain.parameter(l, i).grad(), 1e-4, 1e-5));
      }
    }
  }

  TEST_CASE("a version is not overwritten while slow uploads still read it") {
    at::manual_seed(6);
    // Weights of 64 KiB over 20 MB/s: an upload takes 3 ms, a step much less.
    use_devices("virtual:2,link=0.02GB/s,debug");
    std::vector<LayerSpec> layers;
    for (int l = 0; l < 3; ++l) layers.push_back(linear_layer("l", 128));
    PlainModel plain("m", layers);
    PipedModel piped("m", layers);
    for (int step = 0; step < 6; ++step) {
      const Batch batch = make_batch(2, 1, 128);
      const uint64_t call = piped.pipeline().calls();
      const auto result = piped.pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(),
                                                            false, along(fused_stages({0, 1, 2, 3})));
      CHECK(same_losses(result.losses, plain.forward_backward(batch, call).losses));
      piped.step(0.5, true);
      plain.publish();
      plain.update(0.5);
    }
    piped.synchronize();
    plain.publish();
    CHECK(same_state(piped, plain, true));
  }

  TEST_CASE("backward refuses weights that have changed since the forward") {
    use_devices("virtual:1");
    const auto layers = std::vector<LayerSpec>{linear_layer("l", kWidth)};
    PipedModel piped("m", layers);
    const Batch batch = make_batch(1, kRows, kWidth);
    auto outputs = piped.pipeline().forward(batch.inputs, along(train_stages({0, 1})));
    piped.pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(), false,
                                      along(fused_stages({0, 1})));
    piped.step(0.1, false);
    CHECK_THROWS_AS(torch::autograd::backward({outputs.microbatches[0].tensors[0].sum()}, {}), std::invalid_argument);
  }

  TEST_CASE("models and engines can be dropped with work in flight") {
    for (int round = 0; round < 10; ++round) {
      auto engine = use_devices(round % 2 == 0 ? "virtual:3" : "virtual:1,debug");
      const auto layers = every_kind();
      PipedModel piped("m", layers);
      const Batch batch = make_batch(3, kRows, kWidth);
      piped.pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(), false,
                                        along(fused_stages({0, 2, 5, 7})));
      if (round % 3 == 0) piped.step(0.1, true);
      if (round % 3 == 1) engine = use_devices("virtual:2");
    }
    use_devices("virtual:1");
    // A model's shells are dropped with it, on the thread that drops its last call.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(300);
    while (shell_counts().alive.load() > 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    CHECK(shell_counts().alive.load() == 0);
  }
}

}  // namespace pipeline_test
