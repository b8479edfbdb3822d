#include <roundpipe/runtime/model/model_state.h>

#include <doctest/doctest.h>

#include "support/model.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;

namespace model_state_test {

constexpr int64_t kWidth = 4;

// A linear layer whose weight is frozen, as under an adapter.
LayerSpec adapted_layer(const std::string& name) {
  LayerSpec spec = linear_layer(name, kWidth);
  spec.parameters[0].tensor.set_requires_grad(false);
  return spec;
}

TEST_SUITE("model_state") {
  TEST_CASE("what is frozen has a block of its own, without gradients") {
    use_devices("virtual:2,debug");
    at::manual_seed(1);
    const std::vector<LayerSpec> layers = {linear_layer("whole", kWidth), adapted_layer("mixed"),
                                           adapted_layer("mixed too")};
    PlainModel plain("m", layers);
    PipedModel piped("m", layers);
    const ModelState& model = piped.pipeline().model();
    REQUIRE(model.layers[0]->blocks.size() == 1);
    const LayerState& mixed = *model.layers[1];
    REQUIRE(mixed.blocks.size() == 2);
    CHECK(model.blocks[mixed.blocks[0]].trainable());
    CHECK_FALSE(model.blocks[mixed.blocks[1]].trainable());
    const StageLayout stage = lay_out_stage(model, 1, 2);
    CHECK(stage.gradient_bytes == model.blocks[mixed.blocks[0]].block->layout().size_bytes);
    CHECK(stage.layers[0].blocks_at.size() == 2);

    for (int step = 0; step < 3; ++step) {
      const Batch batch = make_batch(2, 3, kWidth);
      const uint64_t call = piped.pipeline().calls();
      piped.pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(), false,
                                        along(fused_stages({0, 1, 3})));
      CHECK(model.gradients[mixed.blocks[0]] != nullptr);
      CHECK(model.gradients[mixed.blocks[1]] == nullptr);
      plain.forward_backward(batch, call);
      piped.step(0.1, /*asynchronous=*/false);
      plain.update(0.1);
      plain.publish();
    }
    piped.synchronize();
    CHECK(same_state(piped, plain, /*with_buffers=*/true));
    // One buffer for the weights, and none for gradients or a next version.
    const BlockState& frozen = model.blocks[mixed.blocks[1]];
    CHECK(frozen.block->buffers()->host_bytes() == frozen.block->layout().size_bytes);
  }

  TEST_CASE("what is set free or frozen later still trains right") {
    use_devices("virtual:2,debug");
    at::manual_seed(2);
    std::vector<LayerSpec> layers = {linear_layer("a", kWidth), adapted_layer("b")};
    PipedModel piped("m", layers);
    const at::Tensor frozen_first = piped.pipeline().model().blocks[2].block->parameters()[0].tensor;
    frozen_first.set_requires_grad(true);
    const Batch batch = make_batch(2, 3, kWidth);
    piped.pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(), false,
                                      along(fused_stages({0, 1, 2})));
    piped.synchronize();
    const ModelState& model = piped.pipeline().model();
    CHECK(model.gradients[1] != nullptr);
    CHECK(model.gradients[2] != nullptr);
    CHECK(frozen_first.grad().defined());
  }
}

}  // namespace model_state_test
