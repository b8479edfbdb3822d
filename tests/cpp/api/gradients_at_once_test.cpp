#include <doctest/doctest.h>

#include <roundpipe/runtime/model_optimizer.h>
#include <roundpipe/runtime/pipeline.h>

#include "../files/faulty_files.h"
#include "support/chain.h"

using namespace roundpipe;
using namespace roundpipe::support;
using files::test::contains;

namespace {

struct PipelineOf : Model {
  static runtime::Pipeline& of(Model& model) { return (model.*&PipelineOf::pipeline)(); }
};

struct AtOnce {
  AtOnce(const Chain& like, const OptimizerFormat& format)
      : chain(twin(like)), model(chain.layers()), optimizer(model, torch::optim::AdamWOptions(0.01), {}, format) {
    model.run_options().microbatches = 3;
  }
  static Chain twin(const Chain& like) {
    at::manual_seed(5);
    return like.twin();
  }
  void forward_backward(uint64_t number) {
    const Sample batch = sample(number);
    model.forward_backward(batch.inputs, batch.labels, squared_error);
  }
  const runtime::ModelState& held() { return PipelineOf::of(model).model(); }
  const memory::GradientRoom& room() { return *held().gradient_room; }
  std::vector<Tensor> state() {
    model.synchronize();
    return copies_of(chain.parameters());
  }

  Chain chain;
  Model model;
  Optimizer optimizer;
};

const StepOptions kSynchronous{.asynchronous = false};
const OptimizerFormat kAtOnce{.gradients_at_once = true};

}  // namespace

TEST_CASE("gradients at once: the bits are those of gradients that wait, in a few layers' memory, on any devices") {
  for (const int devices : {1, 2, 3, 4}) {
    CAPTURE(devices);
    set_devices(concat("virtual:", devices));
    const Chain start;
    AtOnce plain(start, {}), at_once(start, kAtOnce);
    int64_t weights = 0;
    for (const runtime::BlockState& block : at_once.held().blocks) weights += block.block->layout().size_bytes;
    for (uint64_t number = 0; number < 4; ++number) {
      for (AtOnce* const each : {&plain, &at_once}) {
        each->forward_backward(number);
        each->model.step(each->optimizer, kSynchronous);
        each->model.synchronize();  // so that nobody waits for it while gradients of the next call come
      }
    }
    CHECK(same_state(at_once.state(), plain.state()));
    CHECK(at_once.room().most_bytes() <= at_once.room().limit_bytes());
    CHECK(at_once.held().host_bytes() <= weights + at_once.room().limit_bytes());
  }
}

TEST_CASE("gradients at once: whatever the user does instead of a step ends, and a step may still come") {
  set_devices("virtual:2");
  const Chain start;
  AtOnce plain(start, {}), at_once(start, kAtOnce);
  for (AtOnce* const each : {&plain, &at_once}) {
    each->forward_backward(0);
    each->model.synchronize();  // all gradients land
    each->model.step(each->optimizer, kSynchronous);
    each->forward_backward(1);
    each->optimizer.zero_grad();
    each->forward_backward(2);
    each->model.step(each->optimizer, kSynchronous).wait();
  }
  CHECK(same_state(at_once.state(), plain.state()));
  at_once.forward_backward(3);  // ends with its model
}

TEST_CASE("gradients at once: what needs all of them is refused, and nothing has changed") {
  set_devices("virtual:1");
  const Chain start;
  AtOnce at_once(start, kAtOnce), plain(start, {});
  at_once.forward_backward(0);
  plain.forward_backward(0);
  const auto told = [&](const auto& action) { return files::test::error_of<std::invalid_argument>(action); };
  CHECK(contains(told([&] { at_once.model.step(at_once.optimizer, {}); }), "expected a synchronous one"));
  CHECK(contains(told([&] { at_once.model.step(at_once.optimizer, {.asynchronous = false, .max_grad_norm = 1.0}); }),
                 "max_grad_norm needs all gradients"));
  CHECK(contains(told([&] { at_once.forward_backward(1); }), "expected a step after each forward_backward"));
  for (AtOnce* const each : {&plain, &at_once}) each->model.step(each->optimizer, kSynchronous);
  CHECK(same_state(at_once.state(), plain.state()));
  CHECK(contains(told([&] {
                   const OptimizerFormat both{.gradients_in_fp32 = true, .gradients_at_once = true};
                   const Optimizer refused(at_once.model, torch::optim::AdamWOptions(0.01), {}, both);
                 }),
                 "gradients are used at once"));
}

TEST_CASE("gradients at once: another optimizer of the model may keep them again") {
  set_devices("virtual:2");
  const Chain start;
  AtOnce plain(start, {}), at_once(start, kAtOnce);
  for (AtOnce* const each : {&plain, &at_once}) {
    each->forward_backward(0);
    each->model.step(each->optimizer, kSynchronous);
    each->forward_backward(1);
    Optimizer next(each->model, torch::optim::AdamWOptions(0.01));
    each->forward_backward(2);
    each->model.step(next, {.asynchronous = true, .max_grad_norm = 0.5});
    each->model.synchronize();
  }
  CHECK(same_state(at_once.state(), plain.state()));
}
