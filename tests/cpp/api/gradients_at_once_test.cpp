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
  // A step by this batch; returns its norm.
  double clipped_step(uint64_t number) {
    forward_backward(number);
    return model.step(optimizer, {.asynchronous = false, .max_grad_norm = kClip}).grad_norm();
  }
  // The same in two passes.
  double step_in_two_passes(uint64_t number) {
    forward_backward(number);
    const double norm = model.measure_gradients(optimizer);
    forward_backward(number);
    const Step step = model.step(optimizer, kMeasured);
    model.synchronize();  // so that nobody waits for it while gradients of the next call come
    return step.grad_norm() == norm ? norm : -1;
  }
  std::vector<Tensor> state() {
    model.synchronize();
    std::vector<Tensor> all = copies_of(chain.parameters());
    for (const Tensor& buffer : copies_of(chain.buffers())) all.push_back(buffer);
    return all;
  }

  static constexpr double kClip = 0.5;
  static constexpr StepOptions kMeasured{
      .asynchronous = false, .max_grad_norm = kClip, .clip_by = ClipBy::kMeasuredNorm};

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

TEST_CASE("gradients at once: two passes have the bits of clipped gradients that wait, with draws and buffers") {
  const TemporaryFolder folder;
  for (const int devices : {1, 2, 3, 4}) {
    CAPTURE(devices);
    set_devices(concat("virtual:", devices));
    const Chain start;
    OptimizerFormat with_disk = kAtOnce;
    with_disk.disk = {.folder = folder.path()};
    AtOnce plain(start, {}), at_once(start, kAtOnce), on_disk(start, with_disk);
    for (uint64_t number = 0; number < 4; ++number) {
      const double norm = plain.clipped_step(number);
      CHECK(norm > AtOnce::kClip);
      CHECK(at_once.step_in_two_passes(number) == norm);
      CHECK(on_disk.step_in_two_passes(number) == norm);
    }
    CHECK(same_state(at_once.state(), plain.state()));
    CHECK(same_state(on_disk.state(), plain.state()));
    CHECK(at_once.room().most_bytes() <= at_once.room().limit_bytes());
    CHECK(at_once.model.calls() == plain.model.calls());
    CHECK(at_once.optimizer.steps() == 4);
  }
}

TEST_CASE("gradients at once: both passes take the room of three layers, and the first leaves a disk alone") {
  const TemporaryFolder folder;
  for (const int devices : {1, 3}) {
    CAPTURE(devices);
    set_devices(concat("virtual:", devices));
    torch::nn::Sequential chain;
    for (int layer = 0; layer < 8; ++layer) chain->push_back(torch::nn::Linear(Chain::kIn, Chain::kIn));
    Model model(chain);
    Optimizer optimizer(model, torch::optim::AdamWOptions(0.01), {},
                        {.gradients_at_once = true, .disk = {.folder = folder.path()}});
    const auto size = [](const Tensor& outputs, const Tensor&) { return outputs.square().sum(); };
    constexpr int kSteps = 4;
    for (int number = 0; number < kSteps; ++number) {
      const Sample batch = sample(static_cast<uint64_t>(number));
      Model::Pending first = model.submit(batch.inputs, batch.labels, size);
      model.measure_gradients(optimizer);
      Model::Pending second = model.submit(batch.inputs, batch.labels, size);
      model.step(optimizer, AtOnce::kMeasured).wait();
      CHECK(torch::equal(first.finish().loss, second.finish().loss));
    }
    const memory::GradientRoom& room = *PipelineOf::of(model).model().gradient_room;
    CHECK(room.most_bytes() <= room.limit_bytes());
    // Each step reads the moments once, and may read ahead for the next.
    int64_t moments = 0;
    for (size_t b = 0; b < optimizer.core()->block_count(); ++b)
      moments += optimizer.core()->block(b).stored_bytes(optimizer.all_options(), DiskHolds::kMoments);
    CHECK(optimizer.core()->disk_tier()->stats().read_bytes <= (kSteps + 1) * moments);
  }
}

TEST_CASE("gradients at once: a measurement changes nothing, the last one counts, and any step ends it") {
  set_devices("virtual:2");
  const Chain start;
  AtOnce plain(start, {}), at_once(start, kAtOnce);
  const std::vector<Tensor> before = at_once.state();
  at_once.forward_backward(7);
  at_once.model.measure_gradients(at_once.optimizer);
  CHECK(same_state(at_once.state(), before));
  CHECK(at_once.model.calls() == 0);
  CHECK(at_once.step_in_two_passes(0) == plain.clipped_step(0));
  at_once.forward_backward(1);
  at_once.model.measure_gradients(at_once.optimizer);
  for (AtOnce* const each : {&plain, &at_once}) {
    each->forward_backward(1);
    each->model.step(each->optimizer, kSynchronous);
  }
  at_once.forward_backward(2);
  CHECK_THROWS_AS(at_once.model.step(at_once.optimizer, AtOnce::kMeasured), std::invalid_argument);
  for (AtOnce* const each : {&plain, &at_once}) {
    if (each == &plain) each->forward_backward(2);
    each->model.step(each->optimizer, kSynchronous);
  }
  CHECK(same_state(at_once.state(), plain.state()));
}

TEST_CASE("gradients at once: passes that fail may be made again, with the same bits") {
  set_devices("virtual:2");
  const Chain start;
  AtOnce plain(start, {}), at_once(start, kAtOnce);
  const auto failing_pass = [&] {
    at_once.chain.trap->throw_from(2);
    CHECK_THROWS_AS(at_once.forward_backward(0), OnPurpose);
    at_once.chain.trap->clear();
  };
  failing_pass();
  CHECK_THROWS_AS(at_once.model.measure_gradients(at_once.optimizer), std::invalid_argument);
  at_once.forward_backward(0);
  const double norm = at_once.model.measure_gradients(at_once.optimizer);
  failing_pass();
  at_once.forward_backward(0);
  at_once.model.step(at_once.optimizer, AtOnce::kMeasured);
  CHECK(plain.clipped_step(0) == norm);
  CHECK(same_state(at_once.state(), plain.state()));
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
  CHECK(contains(told([&] { at_once.model.step(at_once.optimizer, AtOnce::kMeasured); }), "no norm has been measured"));
  CHECK(contains(
      told([&] { at_once.model.step(at_once.optimizer, {.asynchronous = false, .clip_by = ClipBy::kLastNorm}); }),
      "clip_by = last_norm is given without max_grad_norm"));
  CHECK(contains(told([&] { plain.model.step(plain.optimizer, AtOnce::kMeasured); }),
                 "expected it with an optimizer that uses gradients at once"));
  CHECK(contains(told([&] { plain.model.measure_gradients(plain.optimizer); }), "expected one that uses them at once"));
  CHECK(contains(told([&] { at_once.forward_backward(1); }), "expected a step after each forward_backward"));
  at_once.model.measure_gradients(at_once.optimizer);
  CHECK(contains(told([&] { at_once.model.measure_gradients(at_once.optimizer); }), "there are no gradients"));
  CHECK(contains(told([&] { at_once.model.step(at_once.optimizer, AtOnce::kMeasured); }),
                 "the measured gradients have been dropped"));
  at_once.forward_backward(1);
  CHECK(contains(told([&] { at_once.model.step(at_once.optimizer, AtOnce::kMeasured); }),
                 "the losses of this batch are others than those of the measured one"));
  at_once.model.measure_gradients(at_once.optimizer);
  at_once.forward_backward(0);
  for (AtOnce* const each : {&plain, &at_once}) each->model.step(each->optimizer, kSynchronous);
  CHECK(same_state(at_once.state(), plain.state()));
  CHECK(contains(told([&] { at_once.model.forward(sample(1).inputs).sum().backward(); }),
                 "[backward] this backward ends before a step can begin"));
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
