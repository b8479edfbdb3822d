#include <roundpipe/runtime/step_run.h>

#include <cmath>
#include <limits>

#include <ATen/core/grad_mode.h>

#include <roundpipe/device/emulated_time.h>
#include <roundpipe/optim/thread_pool.h>
#include <roundpipe/runtime/update_thread.h>

namespace roundpipe::runtime {

using device::EventPtr;
using optim::ThreadPool;

StepRun::StepRun(uint64_t number, std::vector<BlockStep> blocks, std::vector<optim::Hyperparameters> groups,
                 const StepOptions& options, std::shared_ptr<void> owner)
    : number_(number),
      blocks_(std::move(blocks)),
      groups_(std::move(groups)),
      options_(options),
      owner_(std::move(owner)),
      norm_(std::numeric_limits<double>::quiet_NaN()) {
  if (options_.loss_scale > 0) scaling_.inverse_scale = static_cast<float>(1.0 / options_.loss_scale);
}

void StepRun::start() {
  to_update_ = blocks_.size();
  if (blocks_.empty()) {
    decided_->fire();
    finished_->fire();
    return;
  }
  const bool look_first = options_.max_norm > 0 || options_.loss_scale > 0;
  if (!look_first) {
    decided_->fire();
    for (BlockStep& step : blocks_) wait_to_update(step, step.gradients->landed);
    return;
  }
  to_measure_ = blocks_.size();
  for (BlockStep& step : blocks_) {
    step.gradients->landed->then([self = shared_from_this(), &step] {
      UpdateThread::instance().submit({self->number_, UpdateThread::Kind::kNorm, step.layer},
                                      [self, &step] { self->measure(step); });
    });
  }
}

void StepRun::measure(BlockStep& step) {
  if (step.gradients->landed->error()) {
    gradients_failed_ = true;
  } else if (step.gradients->flat.defined()) {
    step.squares = step.optimizer->sum_of_squares(*step.gradients, step.block->gradient_layout, scaling_.inverse_scale,
                                                  *ThreadPool::current());
  }
  if (--to_measure_ == 0) decide();
}

void StepRun::decide() {
  // In block order, whatever the order of arrival, so that the sum has the same bits every time.
  double squares = 0;
  for (const BlockStep& step : blocks_) squares += step.squares;
  const auto norm = static_cast<float>(std::sqrt(squares));
  if (!gradients_failed_) norm_ = norm;
  overflowed_ = options_.loss_scale > 0 && !std::isfinite(norm_);
  if (options_.max_norm > 0) {
    // As torch.nn.utils.clip_grad_norm_ computes it, in fp32.
    const float factor = 1.0F / (norm + 1e-6F) * static_cast<float>(options_.max_norm);
    scaling_.clip = factor > 1.0F ? 1.0F : factor;
  }
  decided_->fire();
  for (BlockStep& step : blocks_) wait_to_update(step, nullptr);
}

void StepRun::wait_to_update(BlockStep& step, const EventPtr& also) {
  device::when_all({step.before->published, also}, [self = shared_from_this(), &step] {
    UpdateThread::instance().submit({self->number_, UpdateThread::Kind::kUpdate, step.layer},
                                    [self, &step] { self->update(step); });
  });
}

void StepRun::pass_on(BlockStep& step) {
  step.after->flat = step.before->flat;
  step.after->published->fire();
}

void StepRun::make(BlockStep& step) {
  if (step.emulated_ms > 0) {
    static device::EmulatedTime time;  // the update thread's
    time.spend(step.emulated_ms);
    return pass_on(step);
  }
  if (!step.gradients->flat.defined()) return pass_on(step);
  const bool shared = step.block->gradient_buffers == step.block->block->buffers();
  const at::Tensor after = shared ? step.gradients->flat : step.block->block->buffers()->take();
  step.optimizer->update(step.before->flat, after, *step.gradients, step.block->gradient_layout, groups_, scaling_,
                         *ThreadPool::current());
  step.after->flat = after;
  step.after->published->fire();
}

void StepRun::update(BlockStep& step) {
  const at::NoGradGuard no_grad;
  gradients_failed_ |= step.gradients->landed->error() != nullptr;
  for (const size_t index : step.written) {
    if (step.before->published->error()) break;
    step.optimizer->restart_master(index, step.block->block->layout().view(step.before->flat, index));
  }
  if (const std::exception_ptr error = step.before->published->error()) {
    step.after->published->fail(error);
  } else if (gradients_failed_ || overflowed_) {
    abandoned_ += gradients_failed_ ? 1 : 0;
    pass_on(step);
  } else {
    try {
      make(step);
      ++updated_;
    } catch (...) {
      error_ = std::current_exception();
      step.after->published->fail(error_);
    }
  }
  // What the call still holds of them is not needed any more.
  if (!step.gradients->landed->error()) step.gradients->flat.reset();
  step.before.reset();
  step.after.reset();
  if (--to_update_ > 0) return;
  owner_.reset();
  if (error_) {
    finished_->fail(error_);
  } else {
    finished_->fire();
  }
}

}  // namespace roundpipe::runtime
