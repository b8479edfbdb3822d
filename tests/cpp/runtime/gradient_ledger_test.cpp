#include <thread>

#include <doctest/doctest.h>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/runtime/pipeline.h>

#include "support/model.h"

using namespace roundpipe;
using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;

namespace gradient_ledger_test {

void train(PipedModel& piped, const Batch& batch) {
  piped.pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(), false,
                                    along(fused_stages({0, 1, 2})));
}

at::Tensor weight(PipedModel& piped) { return piped.layers()[0].parameters[0].tensor; }

TEST_SUITE("pipeline gradients") {
  TEST_CASE("what was shown and not touched is taken back as it is, without a copy; what was touched counts") {
    use_devices("virtual:2,debug");
    PipedModel piped("m", {linear_layer("first", 4), linear_layer("second", 4)});
    const Batch batch = make_batch(2, 3, 4);
    CHECK_FALSE(piped.pipeline().gradients().any());
    train(piped, batch);
    CHECK(piped.pipeline().gradients().any());
    piped.synchronize();
    const at::Tensor once = weight(piped).grad().clone();
    const void* place = weight(piped).grad().data_ptr();

    SUBCASE("taken back by a step that never comes: the block is the same") {
      const auto taken = piped.pipeline().take_gradients();
      CHECK_FALSE(weight(piped).grad().defined());
      CHECK(memory::gradient(*taken[0], piped.pipeline().model().blocks[0].gradient_layout, 0).data_ptr() == place);
      CHECK_FALSE(piped.pipeline().gradients().any());
    }
    SUBCASE("the next call adds to it") {
      train(piped, batch);
      piped.synchronize();
      CHECK(at::allclose(weight(piped).grad(), once * 2));
    }
    SUBCASE("changed in place") {
      weight(piped).mutable_grad().zero_();
      train(piped, batch);
      piped.synchronize();
      CHECK(at::allclose(weight(piped).grad(), once));
    }
    SUBCASE("cleared") {
      for (const LayerSpec& layer : piped.layers()) {
        for (const memory::NamedTensor& parameter : layer.parameters) parameter.tensor.mutable_grad().reset();
      }
      train(piped, batch);
      piped.synchronize();
      CHECK(at::allclose(weight(piped).grad(), once));
    }
  }

  TEST_CASE("what autograd leaves in .grad beside sums that are not shown counts with them") {
    use_devices("virtual:2,debug");
    PipedModel piped("m", {linear_layer("first", 4), linear_layer("second", 4)});
    const Batch batch = make_batch(2, 3, 4);
    train(piped, batch);
    piped.synchronize();
    const at::Tensor once = weight(piped).grad().clone();
    weight(piped).mutable_grad().reset();
    piped.pipeline().take_gradients();
    train(piped, batch);
    weight(piped).mutable_grad() = at::ones_like(once);

    SUBCASE("shown, then taken") {
      piped.synchronize();
      CHECK(same_bits(weight(piped).grad(), once + 1));
    }
    SUBCASE("taken at once") {}
    const auto taken = piped.pipeline().take_gradients();
    const auto& block = piped.pipeline().model().blocks[0];
    taken[0]->landed->wait_complete();
    CHECK(same_bits(memory::gradient(*taken[0], block.gradient_layout, 0), once + 1));
    CHECK_FALSE(weight(piped).grad().defined());
  }

  TEST_CASE("a forward leaves .grad to the user until its backward") {
    use_devices("virtual:2,debug");
    PipedModel piped("m", {linear_layer("first", 4), linear_layer("second", 4)});
    const Batch batch = make_batch(2, 3, 4);
    train(piped, batch);
    piped.synchronize();
    const at::Tensor once = weight(piped).grad().clone();
    RunOptions options;
    options.requires_grad = true;
    auto outputs = piped.pipeline().forward(batch.inputs, along(train_stages({0, 1, 2}), options));
    CHECK(same_bits(weight(piped).grad(), once));
    // Gradients cleared between a forward and its backward stay cleared.
    for (const LayerSpec& layer : piped.layers()) {
      for (const memory::NamedTensor& parameter : layer.parameters) parameter.tensor.mutable_grad().reset();
    }
    piped.pipeline().gradients().set_shows_at_once(true);
    at::Tensor sum;
    for (const Values& microbatch : outputs.microbatches) {
      const at::Tensor part = microbatch.tensors[0].sum();
      sum = sum.defined() ? sum + part : part;
    }
    sum.backward();
    // backward() has returned, so the gradients of this batch alone are there.
    const at::Tensor shown = weight(piped).grad().clone();
    train(piped, batch);
    piped.synchronize();
    CHECK(at::allclose(weight(piped).grad(), shown + once));
  }

  TEST_CASE("a thread that runs layers is no caller") {
    use_devices("virtual:1,debug");
    PipedModel piped("m", {linear_layer("first", 4), linear_layer("second", 4)});
    const Batch batch = make_batch(2, 3, 4);
    std::thread([&] {
      become_device_thread();
      CHECK_THROWS_AS(require_callers_thread(), Error);
      CHECK_THROWS_AS(train(piped, batch), Error);
      CHECK_THROWS_AS(piped.pipeline().drain(), Error);
    }).join();
    require_callers_thread();
    train(piped, batch);
    piped.synchronize();
    CHECK(weight(piped).grad().defined());
  }
}

}  // namespace gradient_ledger_test
