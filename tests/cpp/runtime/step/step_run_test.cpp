// Errors in a step, on the update thread and on the threads that hand work to it.
#include <roundpipe/runtime/step/step_run.h>

#include <stdexcept>
#include <string>

#include <doctest/doctest.h>

#include <roundpipe/runtime/step/update_thread.h>

#include "support/model.h"

using namespace roundpipe;
using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;
using Reads = memory::ParameterBlock::Reads;

namespace step_run_test {

constexpr int64_t kWidth = 4;

// Two blocks of weights with gradients as a call leaves them.
struct Setup {
  std::vector<LayerSpec> layers = {linear_layer("a", kWidth), linear_layer("b", kWidth)};
  std::shared_ptr<ModelState> model = make();
  std::vector<std::unique_ptr<optim::BlockOptimizer>> optimizers;
  std::vector<memory::GradientBlockPtr> gradients;
  std::vector<memory::WeightVersionPtr> after;

  std::shared_ptr<ModelState> make() {
    std::vector<std::unique_ptr<Layer>> made;
    for (const LayerSpec& spec : layers) made.push_back(std::make_unique<NativeLayer>(spec));
    return std::make_shared<ModelState>("m", std::move(made), /*pinned=*/false);
  }

  std::shared_ptr<StepRun> run(const StepOptions& options, double loss_scale = 0) {
    std::vector<BlockStep> steps;
    optimizers.clear();
    gradients.clear();
    after.clear();
    for (BlockState& block : model->blocks) {
      const size_t parameters = block.block->parameters().size();
      block.remainders = std::make_shared<optim::Remainders>();
      optimizers.push_back(std::make_unique<optim::BlockOptimizer>(*block.block, std::vector<int>(parameters, 0),
                                                                   *block.remainders, optim::Algorithm::kSGD,
                                                                   optim::MomentFormat::kFloat32));
      auto gradient = std::make_shared<memory::GradientBlock>();
      gradient->flat = block.gradient_buffers->take();
      gradient->flat.zero_();
      gradient->received.assign(parameters, 1);
      const memory::ParameterBlock::Update versions =
          block.block->begin_update(options.asynchronous ? Reads::kBefore : Reads::kAfter);
      BlockStep& step = steps.emplace_back();
      step.block = &block;
      step.optimizer = optimizers.back().get();
      step.gradients = gradient;
      step.before = versions.before;
      step.after = versions.after;
      gradients.push_back(gradient);
      after.push_back(versions.after);
    }
    static uint64_t number = 1000;
    optim::Hyperparameters hyper;
    hyper.lr = 1.0;
    return std::make_shared<StepRun>(number++, std::move(steps), std::vector{hyper}, options, loss_scale, nullptr);
  }
  void land() {
    for (const auto& gradient : gradients) gradient->landed->fire();
  }
  // Any look at the gradient fails: it has less memory than the layout says, and cannot grow.
  void break_gradient(size_t block) {
    static uint8_t byte = 0;
    gradients[block]->flat = at::from_blob(&byte, {1}, at::kByte);
  }
};

TEST_SUITE("step run") {
  TEST_CASE("an error while gradients are looked at fails the step, and leaves all weights as they are") {
    for (const double loss_scale : {0.0, 2.0}) {
      const StepOptions options{.max_grad_norm = loss_scale > 0 ? std::nullopt : std::optional(1.0)};
      Setup setup;
      const at::Tensor before = setup.model->blocks[0].block->current()->flat.clone();
      const auto run = setup.run(options, loss_scale);
      run->start();
      setup.break_gradient(1);
      setup.land();
      CHECK_THROWS(run->decided()->wait());
      CHECK_THROWS(run->finished()->wait());
      CHECK(std::isnan(run->norm()));
      CHECK(run->updated_blocks() == 0);
      for (const auto& version : setup.after) CHECK_NOTHROW(version->published->wait());
      CHECK(at::equal(setup.after[0]->flat, before));
      // The next step succeeds.
      const auto next = setup.run(options, loss_scale);
      next->start();
      setup.land();
      next->finished()->wait();
      CHECK(next->updated_blocks() == 2);
    }
    CHECK(device::escaped_error() == nullptr);
  }

  TEST_CASE("an error in an update fails the step and the block's weights; the others are made") {
    Setup setup;
    const auto run = setup.run({});
    run->start();
    setup.break_gradient(0);
    setup.land();
    CHECK_NOTHROW(run->decided()->wait());
    CHECK_THROWS(run->finished()->wait());
    CHECK_THROWS(setup.after[0]->published->wait());
    CHECK_NOTHROW(setup.after[1]->published->wait());
    CHECK(run->updated_blocks() == 1);
    // Steps that build on it fail, too.
    const auto next = setup.run({});
    next->start();
    setup.land();
    CHECK_THROWS(next->finished()->wait());
    CHECK_THROWS(setup.after[0]->published->wait());
    CHECK_NOTHROW(setup.after[1]->published->wait());
  }

  TEST_CASE("gradients that never come are no error of the step: it leaves the weights as they are") {
    Setup setup;
    const auto run = setup.run({});
    run->start();
    for (const auto& gradient : setup.gradients)
      gradient->landed->fail(std::make_exception_ptr(std::runtime_error("the call failed")));
    CHECK_NOTHROW(run->finished()->wait());
    CHECK(run->abandoned_blocks() == 2);
    for (const auto& version : setup.after) CHECK_NOTHROW(version->published->wait());
  }
}

}  // namespace step_run_test
