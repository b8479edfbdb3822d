#include <roundpipe/runtime/worker/gradient_sums.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <doctest/doctest.h>

#include <roundpipe/core/error.h>

#include "../support/model.h"

using namespace roundpipe;
using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;

namespace gradient_sums_test {

constexpr int64_t kRows = 3, kWidth = 4;
constexpr double kLong_ms = 60'000;  // far above what anything here takes

// A linear layer that calls `look(microbatch)` when its backward begins.
LayerSpec looking_layer(std::function<void(int)> look) {
  LayerSpec spec = linear_layer("looking", kWidth);
  spec.body = [body = spec.body, look = std::move(look)](Tensors inputs, const Tensors& parameters,
                                                         const Tensors& buffers, const LayerContext& context) {
    Tensors outputs = body(std::move(inputs), parameters, buffers, context);
    if (outputs[0].requires_grad()) {
      outputs[0].register_hook([look, microbatch = context.microbatch](const at::Tensor& gradient) {
        look(microbatch);
        return gradient;
      });
    }
    return outputs;
  };
  return spec;
}

// A linear layer whose weight goes another way if `late`: a thread of its own makes that part of the graph, which
// autograd takes for older than everything that the device's thread has made, so it comes last.
LayerSpec late_layer(std::shared_ptr<std::atomic<bool>> late) {
  LayerSpec spec = linear_layer("late", kWidth);
  spec.body = [late](Tensors inputs, const Tensors& parameters, const Tensors&, const LayerContext&) {
    at::Tensor weight = parameters[0];
    const auto doubled = [&] {
      const at::AutoGradMode records(true);
      weight = parameters[0] * 2;
    };
    if (*late) {
      std::thread(doubled).join();
    } else {
      doubled();
    }
    inputs[0] = at::linear(at::tanh(inputs[0]), weight, parameters[1]);
    return inputs;
  };
  return spec;
}

// A layer of one weight, of any type.
LayerSpec typed_layer(std::string name, const at::Tensor& weight) {
  LayerSpec spec(std::move(name));
  spec.parameters = {{"weight", weight}};
  spec.body = [](Tensors inputs, const Tensors& parameters, const Tensors&, const LayerContext&) {
    inputs[0] = at::linear(inputs[0], parameters[0].to(at::kFloat));
    return inputs;
  };
  return spec;
}

RunOptions by(RecomputeGrain grain) {
  RunOptions options;
  options.recompute_grain = grain;
  return options;
}

void call(PipedModel& piped, const Batch& batch, const RunOptions& options, const schedule::Stages& stages) {
  piped.pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(), false,
                                    along(stages, options));
}

TEST_SUITE("gradient sums") {
  TEST_CASE("those of upper layers land while the last backward is still below them") {
    for (const RecomputeGrain grain : {RecomputeGrain::kStage, RecomputeGrain::kLayer}) {
      for (const int microbatches : {1, 3}) {
        CAPTURE(grain);
        CAPTURE(microbatches);
        at::manual_seed(1);
        use_devices("virtual:1");
        const at::Tensor weight = parameter({kWidth, kWidth}, 0.4);
        std::atomic<bool> asks{false}, landed{true};
        std::promise<std::vector<device::EventPtr>> sums;
        const std::vector<LayerSpec> layers{
            looking_layer([&](int microbatch) {
              if (!asks || microbatch + 1 < microbatches) return;
              for (const device::EventPtr& sum : sums.get_future().get()) landed = landed && sum->wait_for(kLong_ms);
            }),
            tied_layer("middle", weight), tied_layer("top", weight)};  // with a sum for its own, and one for the shared
        PipedModel piped("m", layers);
        PlainModel plain("m", layers);
        for (int step = 0; step < 2; ++step) {
          // A first microbatch tells that no gradient comes late.
          asks = step > 0 || microbatches > 1;
          if (step == 1) sums = {};
          const Batch batch = make_batch(microbatches, kRows, kWidth);
          const uint64_t index = piped.pipeline().calls();
          call(piped, batch, by(grain), fused_stages({0, 3}));
          const ModelState& model = piped.pipeline().model();
          std::vector<device::EventPtr> above;
          for (size_t block = 0; block < model.blocks.size(); ++block) {
            if (model.blocks[block].layers.front() > 0) above.push_back(model.gradients[block]->landed);
          }
          CHECK(above.size() == 3);
          sums.set_value(above);
          piped.pipeline().drain();
          asks = false;
          plain.forward_backward(batch, index);
        }
        CHECK(landed);
        piped.synchronize();
        plain.publish();
        CHECK(same_state(piped, plain, false));
      }
    }
  }

  TEST_CASE("a microbatch that runs out of memory after some have left takes no gradient twice") {
    for (const int groups : {1, 2}) {
      CAPTURE(groups);
      at::manual_seed(2);
      use_devices("virtual:1");
      std::atomic<bool> fails{false};
      const at::Tensor weight = parameter({kWidth, kWidth}, 0.4);
      const std::vector<LayerSpec> layers{tied_layer("tied", weight), looking_layer([&](int microbatch) {
                                            if (microbatch == 2 && fails.exchange(false))
                                              TORCH_CHECK_WITH(OutOfMemoryError, false, "none left");
                                          }),
                                          linear_layer("middle", kWidth), tied_layer("top", weight)};
      PipedModel piped("m", layers);
      PlainModel plain("m", layers);
      RunOptions options;
      options.gradient_groups = groups;
      for (int step = 0; step < 3; ++step) {
        fails = step == 1;  // from then on, it runs layer by layer
        const Batch batch = make_batch(3, kRows, kWidth);
        const uint64_t index = piped.pipeline().calls();
        call(piped, batch, options, fused_stages({0, 4}));
        piped.pipeline().drain();
        CHECK_FALSE(fails);
        plain.forward_backward(batch, index);
      }
      piped.synchronize();
      plain.publish();
      if (groups == 1) CHECK(same_state(piped, plain, false));
      for (size_t l = 0; l < layers.size(); ++l) {
        for (size_t i = 0; i < layers[l].parameters.size(); ++i) {
          const at::Tensor found = layers[l].parameters[i].tensor.grad();
          CHECK(at::allclose(found, plain.parameter(l, i).grad(), 1e-5, 1e-6));
        }
      }
    }
  }

  TEST_CASE("layers of one job that share a block send one rounded sum, with the bits of those that the host adds") {
    constexpr int kCalls = 3;
    struct Trained {
      Tensors gradients;
      int64_t sent_bytes = 0, least_bytes = 0;
    };
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      for (const int groups : {1, 2}) {
        CAPTURE(type);
        CAPTURE(groups);
        const auto train = [&](const schedule::Stages& stages) {
          at::manual_seed(5);
          const std::shared_ptr<Engine> engine = use_devices("virtual:1");
          const at::Tensor weight = parameter({kWidth, kWidth}, 0.4).detach().to(type).set_requires_grad(true);
          const std::vector<LayerSpec> layers{typed_layer("bottom", weight), linear_layer("middle", kWidth),
                                              typed_layer("next", weight), typed_layer("top", weight)};
          PipedModel piped("m", layers);
          RunOptions options;
          options.gradient_groups = groups;
          for (int index = 0; index < kCalls; ++index) call(piped, make_batch(4, kRows, kWidth), options, stages);
          piped.synchronize();
          Trained trained;
          trained.sent_bytes = engine->worker(0).download().use(schedule::Priority::kParameterGradient).bytes;
          for (const BlockState& block : piped.pipeline().model().blocks) {
            trained.least_bytes += kCalls * block.gradient_layout.size_bytes;
            for (const memory::NamedTensor& each : block.block->parameters())
              trained.gradients.push_back(each.tensor.grad().clone());
          }
          return trained;
        };
        const Trained joined = train(fused_stages({0, 4})), apart = train(fused_stages({0, 3, 4}));
        CHECK(joined.gradients.size() == 3);
        CHECK(same_bits(joined.gradients, apart.gradients));
        CHECK(joined.sent_bytes == joined.least_bytes);
        CHECK(apart.sent_bytes > apart.least_bytes);
      }
    }
  }

  TEST_CASE("where gradients come late, sums wait for the end of the backward") {
    for (const int microbatches : {1, 3}) {
      CAPTURE(microbatches);
      at::manual_seed(3);
      use_devices("virtual:1");
      const auto late = std::make_shared<std::atomic<bool>>(true);
      const std::vector<LayerSpec> layers{linear_layer("bottom", kWidth), late_layer(late),
                                          linear_layer("top", kWidth)};
      PipedModel piped("m", layers);
      PlainModel plain("m", layers);
      for (int step = 0; step < 4; ++step) {
        const Batch batch = make_batch(microbatches, kRows, kWidth);
        const uint64_t index = piped.pipeline().calls();
        call(piped, batch, {}, fused_stages({0, 3}));
        piped.pipeline().drain();
        plain.forward_backward(batch, index);
      }
      piped.synchronize();
      plain.publish();
      CHECK(same_state(piped, plain, false));
    }
  }

  TEST_CASE("a gradient that begins to come late is an error once, and none is lost") {
    at::manual_seed(4);
    use_devices("virtual:1");
    const auto late = std::make_shared<std::atomic<bool>>(false);
    const std::vector<LayerSpec> layers{linear_layer("bottom", kWidth), late_layer(late), linear_layer("top", kWidth)};
    PipedModel piped("m", layers);
    PlainModel plain("m", layers);
    const auto both = [&] {
      const Batch batch = make_batch(1, kRows, kWidth);
      const uint64_t index = piped.pipeline().calls();
      call(piped, batch, {}, fused_stages({0, 3}));
      piped.pipeline().drain();
      piped.pipeline().raise_pending();
      plain.forward_backward(batch, index);
    };
    for (int step = 0; step < 3; ++step) both();
    piped.step(0.1, false);
    plain.update(0.1);
    plain.publish();
    *late = true;
    CHECK_THROWS_WITH_AS(both(), doctest::Contains("came after the backward had passed its layer"), Error);
    for (int step = 0; step < 2; ++step) both();
    piped.synchronize();
    plain.publish();
    CHECK(same_state(piped, plain, false));
  }
}

}  // namespace gradient_sums_test
