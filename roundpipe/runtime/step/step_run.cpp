#include <roundpipe/runtime/step/step_run.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include <ATen/core/grad_mode.h>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/device/emulated_time.h>
#include <roundpipe/optim/thread_pool.h>
#include <roundpipe/runtime/step/gradient_measurement.h>

namespace roundpipe::runtime {

using device::EventPtr;
using optim::ThreadPool;

namespace {

// Of gradients that have landed: before, their share may be set just now. Null: they have none.
memory::GradientRoom::SharePtr share_of(const memory::GradientBlock& gradients) {
  return gradients.landed->complete() ? gradients.share : nullptr;
}

}  // namespace

StepRun::StepRun(uint64_t number, std::vector<BlockStep> blocks, std::vector<optim::Hyperparameters> groups,
                 const StepOptions& options, double loss_scale, std::shared_ptr<void> owner,
                 std::shared_ptr<cluster::Nodes> nodes, uint64_t turn, bool at_once, std::optional<double> given_norm)
    : number_(number),
      blocks_(std::move(blocks)),
      groups_(std::move(groups)),
      max_norm_(options.max_grad_norm.value_or(0)),
      loss_scale_(loss_scale),
      gradient_factor_(options.gradient_factor.value_or(nodes ? 1.0 / nodes->size() : 1.0)),
      owner_(std::move(owner)),
      nodes_(std::move(nodes)),
      turn_(turn),
      at_once_(at_once),
      is_measured_(options.clip_by == ClipBy::kMeasuredNorm),
      norm_(is_measured_ ? given_norm.value() : std::numeric_limits<double>::quiet_NaN()) {
  if (loss_scale_ > 0) scaling_.inverse_scale = static_cast<float>(1.0 / loss_scale_);
  if (given_norm) set_clip(static_cast<float>(*given_norm));
}

void StepRun::start() noexcept {
  to_update_ = to_measure_ = blocks_.size();
  try {
    prepare();
    expect_states();
    if (nodes_) start_exchange();
  } catch (...) {
    return fail_all(std::current_exception());
  }
  if (blocks_.empty()) {
    decided_->fire();
    finished_->fire();
    return;
  }
  if (!looks_first()) decided_->fire();
  for (BlockStep& step : blocks_) {
    try {
      wait_to_run(step);
    } catch (...) {
      step.error = std::current_exception();
      hand_in(step.update_work, &StepRun::update, step);
      if (looks_first()) hand_in(step.measure_work, &StepRun::measure, step);
    }
  }
}

void StepRun::prepare() {
  // Of what is ready, the lowest layer goes first, unless a disk reads ahead in the order in which gradients land.
  const bool backwards = !looks_first() && std::ranges::any_of(blocks_, [](const BlockStep& step) {
    return step.optimizer->states().tier() != nullptr;
  });
  const auto work = [&, this](UpdateThread::Kind kind, Part part, BlockStep& step) {
    return UpdateThread::prepare({number_, kind, backwards ? blocks_.back().layer - step.layer : step.layer},
                                 [self = shared_from_this(), part, &step] { (self.get()->*part)(step); });
  };
  for (BlockStep& step : blocks_) {
    // Prepared work holds the step, which holds the work; handing it in, or fail_all(), breaks the circle.
    if (nodes_) {
      step.summed = device::make_event();
      step.made = device::make_event();
    }
    if (looks_first()) step.measure_work = work(UpdateThread::Kind::kNorm, &StepRun::measure, step);
    step.update_work = work(UpdateThread::Kind::kUpdate, &StepRun::update, step);
  }
}

void StepRun::expect_states() {
  std::vector<size_t> order;
  storage::DiskTier* tier = nullptr;
  for (const BlockStep& step : blocks_) {
    const optim::BlockStates& states = step.optimizer->states();
    if (!states.tier()) continue;
    tier = states.tier().get();
    order.push_back(states.index());
  }
  if (tier == nullptr) return;
  // As gradients land, last layer first; if all have to land first, as UpdateThread orders what is ready.
  if (!looks_first()) std::ranges::reverse(order);
  tier->expect(std::move(order));
}

void StepRun::wait_to_run(BlockStep& step) {
  const auto self = shared_from_this();
  const EventPtr landed = nodes_ ? step.summed : step.gradients->landed;
  // The update first: the measurement may start at once, and nothing may throw after that.
  device::when_all({landed, decided_, step.before->published}, [self, &step] {
    if (const auto share = share_of(*step.gradients)) share->is_used();
    self->hand_in(step.update_work, &StepRun::update, step);
  });
  if (looks_first()) landed->then([self, &step] { self->hand_in(step.measure_work, &StepRun::measure, step); });
}

void StepRun::hand_in(UpdateThread::Work& work, Part part, BlockStep& step) noexcept {
  if (UpdateThread::instance().submit(work)) return;
  try {
    require_engine();
  } catch (...) {
    step.error = std::current_exception();
  }
  (this->*part)(step);
  work = {};
}

void StepRun::fail_all(const std::exception_ptr& error) {
  for (BlockStep& step : blocks_) {
    step.optimizer->states().update_is_over();
    step.measure_work = {};
    step.update_work = {};
    step.after->published->fail(error);
  }
  decided_->fail(error);
  finished_->fail(error);
}

void StepRun::note(const std::exception_ptr& error) {
  if (!error_) error_ = error;
}

void StepRun::take_squares(BlockStep& step) {
  if (!step.gradients->flat.defined()) return;
  step.squares = step.optimizer->sums_of_squares(*step.gradients, step.block->gradient_layout, scaling_.inverse_scale,
                                                 *ThreadPool::current());
}

void StepRun::measure(BlockStep& step) {
  const double began_ms = now_ms();
  try {
    if (step.error) std::rethrow_exception(step.error);
    if (step.exchange_error) std::rethrow_exception(step.exchange_error);
    if (step.abandoned || step.gradients->landed->error()) {
      gradients_failed_ = true;
    } else {
      take_squares(step);
    }
  } catch (...) {
    note(std::current_exception());
  }
  step.measured_ms = now_ms() - began_ms;
  if (--to_measure_ > 0) return;
  if (nodes_) {
    measured_->fire();
  } else {
    decide();
  }
}

void StepRun::set_clip(float norm) {
  // As torch.nn.utils.clip_grad_norm_ computes it, in fp32.
  const float factor = 1.0F / (norm + 1e-6F) * static_cast<float>(max_norm_);
  scaling_.clip = factor > 1.0F ? 1.0F : factor;
}

std::optional<double> StepRun::norm_for_next() const {
  const bool is_told = at_once_ && max_norm_ > 0 && std::isfinite(norm_);
  return is_told ? std::optional(norm_) : std::nullopt;
}

void StepRun::decide() {
  if (error_) return decided_->fail(error_);
  const float norm = norm_of_squares(blocks_);
  if (!gradients_failed_) norm_ = norm;
  overflowed_ = loss_scale_ > 0 && !std::isfinite(norm_);
  if (max_norm_ > 0) set_clip(norm);
  decided_->fire();
}

void StepRun::pass_on(BlockStep& step) {
  if (step.before->flat.defined()) step.optimizer->restart_masters(step.before->flat);
  step.after->flat = step.before->flat;
}

void StepRun::make(BlockStep& step) {
  // Before the update, which lets the weights before it go.
  const int64_t bytes = step.before->flat.defined() ? static_cast<int64_t>(step.before->flat.nbytes()) : 0;
  const double began_ms = now_ms();
  compute(step);
  if (step.meter != nullptr && bytes > 0) step.meter->add(bytes, step.measured_ms + now_ms() - began_ms);
}

void StepRun::compute(BlockStep& step) {
  if (step.emulated_ms > 0) {
    static device::EmulatedTime time;  // used by the update thread only
    time.spend(nodes_ ? step.emulated_ms / nodes_->size() : step.emulated_ms);
    return pass_on(step);
  }
  if (!step.gradients->flat.defined()) return pass_on(step);
  if (measures_late()) take_squares(step);
  const bool shared = step.block->gradient_buffers == step.block->block->buffers();
  const at::Tensor after = shared ? step.gradients->flat : step.block->block->buffers()->take();
  step.optimizer->update(step.before->flat, after, *step.gradients, step.block->gradient_layout, groups_, scaling_,
                         *ThreadPool::current());
  step.after->flat = after;
}

bool StepRun::is_left_out(const BlockStep& step) const {
  return step.abandoned || overflowed_ || decided_->error() || (!nodes_ && gradients_failed_);
}

void StepRun::publish(BlockStep& step) {
  if (step.error) std::rethrow_exception(step.error);
  if (step.exchange_error) std::rethrow_exception(step.exchange_error);
  if (const std::exception_ptr error = step.before->published->error()) std::rethrow_exception(error);
  gradients_failed_ |= step.gradients->landed->error() != nullptr;
  for (const size_t index : step.written) step.optimizer->note_written(index);
  try {
    if (is_left_out(step)) {
      abandoned_ += step.abandoned || gradients_failed_ ? 1 : 0;
      pass_on(step);
    } else {
      make(step);
      step.updated = true;
      ++updated_;
    }
  } catch (const storage::Unreadable&) {
    note(std::current_exception());
    step.after->flat = step.before->flat;
  }
}

void StepRun::update(BlockStep& step) {
  const at::NoGradGuard no_grad;
  if (const std::shared_ptr<StateReader> reader = std::move(step.reader)) reader->before_update();
  try {
    publish(step);
    // The call does not need its gradients any more.
    if (!step.gradients->landed->error()) step.gradients->flat.reset();
    (nodes_ ? step.made : step.after->published)->fire();
  } catch (...) {
    if (nodes_) {
      step.made->fail(std::current_exception());
    } else {
      note(std::current_exception());
      step.after->published->fail(std::current_exception());
    }
  }
  if (!nodes_) finish(step);
}

void StepRun::finish(BlockStep& step) {
  step.optimizer->states().update_is_over();
  step.before.reset();
  step.after.reset();
  // Now its memory is that of the weights after the step, and that of those before is free.
  if (const auto share = share_of(*step.gradients)) share->give_back();
  if (--to_update_ > 0) return;
  for (const BlockStep& each : blocks_) {
    if (abandoned_ > 0 && each.updated && each.model != nullptr) each.model->torn(each.block->layers);
  }
  if (measures_late() && abandoned_ == 0 && !error_) norm_ = norm_of_squares(blocks_);
  owner_.reset();
  finished_->end(error_);
}

}  // namespace roundpipe::runtime
