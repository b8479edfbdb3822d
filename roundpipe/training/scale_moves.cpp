#include <roundpipe/training/scale_moves.h>

#include <stdexcept>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/device/event.h>

namespace roundpipe {

using runtime::LossScale;
using runtime::StepRun;

namespace {

at::Tensor scalar(double value) { return at::full({}, value, at::kFloat); }
at::Tensor counter(int64_t value) { return at::full({}, value, at::kInt); }

std::vector<LossScale::ModelPtr> scales_of(const ScaleMoves::Pipelines& models) {
  std::vector<LossScale::ModelPtr> scales;
  for (const auto& model : models) scales.push_back(model->model().loss_scales);
  return scales;
}

}  // namespace

void ScaleMoves::Scale::grow_or_back_off(const ScaleRule& rule, bool overflowed) {
  const at::NoGradGuard no_grad;
  at::_amp_update_scale_(current, growth_tracker, scalar(overflowed ? 1 : 0), rule.growth_factor, rule.backoff_factor,
                         rule.growth_interval);
}

void ScaleMoves::Scale::follow(const ScaleRule& rule, bool overflowed, const at::Tensor& used) {
  const at::Tensor before = current.clone();
  grow_or_back_off(rule, overflowed);
  current = LossScale::after_step(before, current, used, rule.backoff_factor);
}

void ScaleMoves::Pending::decide(Scale& scale) const {
  const std::optional<bool> found = run ? run->overflowed() : later->overflowed;
  if (found) scale.follow(rule, overflowed || *found, used);
}

ScaleMoves::ScaleMoves() : LossScale(at::zeros({}, at::kFloat)) {}

void ScaleMoves::start(double scale, int64_t growth_tracker) {
  const MutexLock lock(mutex_);
  if (scale_.current.defined()) return;
  scale_ = {scalar(scale), counter(growth_tracker)};
  restart(scale_.current.clone());
}

bool ScaleMoves::started() const {
  const MutexLock lock(mutex_);
  return scale_.current.defined();
}

// -- steps ----------------------------------------------------------------------------------------------------------

at::Tensor ScaleMoves::begin_step(const Pipelines& models, bool several_nodes) {
  finish_steps();
  for (const auto& model : models) {
    if (!has_stepped(model->model().loss_scales)) model->wait_losses();
  }
  if (!started()) {
    throw std::invalid_argument(
        "[step] the scaler has scaled no loss yet, expected scaler.scale(loss) in the loss function");
  }
  const at::Tensor scale = of_step(scales_of(models), several_nodes);
  return scale.defined() ? scale : next();
}

void ScaleMoves::stepped(const Pipelines& models, std::shared_ptr<StepRun> run, at::Tensor used, const ScaleRule& rule,
                         bool overflowed) {
  stepped(models);
  const MutexLock lock(mutex_);
  pending_.push_back({std::move(run), nullptr, std::move(used), rule, overflowed});
}

void ScaleMoves::stepped(const Pipelines& models, std::shared_ptr<const LaterDecision> later, at::Tensor used,
                         const ScaleRule& rule) {
  stepped(models);
  const MutexLock lock(mutex_);
  pending_.push_back({nullptr, std::move(later), std::move(used), rule});
}

void ScaleMoves::stepped(const Pipelines& models) {
  LossScale::stepped(scales_of(models));
  if (!moves_outside()) advance();
}

void ScaleMoves::stepped(const Pipelines& models, const ScaleRule& rule, bool overflowed) {
  forget(scales_of(models));
  {
    const MutexLock lock(mutex_);
    scale_.grow_or_back_off(rule, overflowed);
  }
  advance();
}

void ScaleMoves::decided(const at::Tensor& before, const at::Tensor& used, double backoff_factor) {
  const MutexLock lock(mutex_);
  scale_.current = after_step(before, scale_.current, used, backoff_factor);
}

void ScaleMoves::move_outside() {
  set_moves_outside(true);
  advance();
}

bool ScaleMoves::moves_outside() const {
  const MutexLock lock(mutex_);
  return moves_outside_;
}

void ScaleMoves::set_moves_outside(bool moves) {
  const MutexLock lock(mutex_);
  moves_outside_ = moves;
}

void ScaleMoves::advance() {
  if (started()) set_next(copy_of_current());
}

void ScaleMoves::restart_losses() {
  if (started()) restart(copy_of_current());
}

// -- waiting --------------------------------------------------------------------------------------------------------

device::EventPtr ScaleMoves::first_decision() const {
  const MutexLock lock(mutex_);
  return pending_.empty() ? nullptr : pending_.front().decided();
}

void ScaleMoves::finish_steps() {
  require_callers_thread();
  while (const device::EventPtr decided = first_decision()) {
    const auto drop_pending = [&](bool decides) {
      const MutexLock lock(mutex_);
      if (pending_.empty() || pending_.front().decided() != decided) return;
      if (decides) pending_.front().decide(scale_);
      pending_.pop_front();
    };
    try {
      device::wait_interruptible(*decided);
    } catch (...) {
      // An interrupt leaves the step to be waited for; a step that failed has decided nothing.
      if (decided->complete() && decided->error()) drop_pending(/*decides=*/false);
      throw;
    }
    drop_pending(/*decides=*/true);
  }
}

void ScaleMoves::settle(const Pipelines& models) {
  finish_steps();
  if (started()) set_next_unless_waiting(scales_of(models), copy_of_current());
}

void ScaleMoves::settle(const ModelPtr& model) {
  finish_steps();
  if (started()) set_next_unless_waiting({model}, copy_of_current());
}

// -- state ----------------------------------------------------------------------------------------------------------

at::Tensor ScaleMoves::copy_of_current() const {
  const MutexLock lock(mutex_);
  return scale_.current.clone();
}

at::Tensor ScaleMoves::current() const {
  const MutexLock lock(mutex_);
  return scale_.current.defined() ? scale_.current.detach() : at::Tensor();
}

at::Tensor ScaleMoves::growth_tracker() const {
  const MutexLock lock(mutex_);
  return scale_.growth_tracker.defined() ? scale_.growth_tracker.detach() : at::Tensor();
}

ScaleState ScaleMoves::state() {
  finish_steps();
  set_next_unless_waiting(copy_of_current());
  return later_state()();
}

std::function<ScaleState()> ScaleMoves::later_state() const {
  const MutexLock lock(mutex_);
  return [front = waiting_or_next().item<double>(), scale = scale_.copy(), pending = pending_]() mutable {
    // The caller's interrupts are not those of the thread that asks.
    for (; !pending.empty(); pending.pop_front()) {
      const device::EventPtr decided = pending.front().decided();
      device::wait_unless_lost(*decided);
      if (const std::exception_ptr error = decided->error()) std::rethrow_exception(error);
      pending.front().decide(scale);
    }
    return ScaleState{scale.current.item<double>(), front, scale.growth_tracker.item<int64_t>()};
  };
}

void ScaleMoves::resume(const ScaleState& state, bool losses_wait) {
  finish_steps();
  {
    const MutexLock lock(mutex_);
    scale_ = {scalar(state.scale), counter(state.growth_tracker)};
  }
  restart(scalar(state.front), losses_wait);
}

}  // namespace roundpipe
