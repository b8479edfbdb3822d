#include <roundpipe/api/grad_scaler.h>

#include <cmath>
#include <deque>
#include <stdexcept>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <roundpipe/core/error.h>
#include <roundpipe/device/event.h>
#include <roundpipe/runtime/model/loss_scale.h>
#include <roundpipe/runtime/pipeline.h>
#include <roundpipe/runtime/step/step_run.h>

namespace roundpipe {

using runtime::LossScale;
using runtime::Pipeline;

namespace {

at::Tensor scalar(double value) { return at::full({}, value, at::kFloat); }

void require(bool holds, const char* name, double value, const char* expected) {
  if (holds) return;
  throw std::invalid_argument(concat("[GradScaler] ", name, " is ", value, ", expected ", expected));
}

}  // namespace

struct GradScaler::Core final : LossScale {
  // What steps decide.
  struct Scale {
    at::Tensor current;         // () fp32, the result of the latest update
    at::Tensor growth_tracker;  // () int32

    Scale copy() const { return {current.clone(), growth_tracker.clone()}; }

    void grow_or_back_off(const GradScalerOptions& options, bool overflowed) {
      const at::NoGradGuard no_grad;
      at::_amp_update_scale_(current, growth_tracker, scalar(overflowed ? 1 : 0), options.growth_factor,
                             options.backoff_factor, options.growth_interval);
    }

    // After a step that is decided. `used`: the scale of its losses.
    void follow(const GradScalerOptions& options, bool overflowed, const at::Tensor& used) {
      const at::Tensor before = current.clone();
      grow_or_back_off(options, overflowed);
      current = runtime::LossScale::after_step(before, current, used, options.backoff_factor);
    }
  };

  // A step that was started, and the scale of its losses.
  struct Pending {
    std::shared_ptr<runtime::StepRun> run;
    at::Tensor used;
  };

  explicit Core(const GradScalerOptions& given)
      : LossScale(scalar(given.init_scale)), options(given), scale{scalar(given.init_scale), at::zeros({}, at::kInt)} {}

  // Waits for the decisions of the steps so far.
  void finish_steps() ROUNDPIPE_REQUIRES(mutex) {
    while (!pending.empty()) {
      const auto decided = pending.front().run->decided();
      try {
        device::wait_interruptible(*decided);
      } catch (...) {
        // An interrupt leaves the step to be waited for; a step that failed has decided nothing.
        if (decided->complete() && decided->error()) pending.pop_front();
        throw;
      }
      scale.follow(options, pending.front().run->overflowed(), pending.front().used);
      pending.pop_front();
    }
  }

  void settle(const ModelPtr& model) override {
    const MutexLock lock(mutex);
    finish_steps();
    set_next_unless_waiting({model}, scale.current.clone());
  }

  const GradScalerOptions options;
  Mutex mutex;
  Scale scale ROUNDPIPE_GUARDED_BY(mutex);
  std::deque<Pending> pending ROUNDPIPE_GUARDED_BY(mutex);
  at::Tensor step_scale ROUNDPIPE_GUARDED_BY(mutex);  // of the step that is about to be started
};

GradScaler::GradScaler(const GradScalerOptions& options) {
  require(options.init_scale > 0 && std::isfinite(options.init_scale), "init_scale", options.init_scale,
          "a positive number");
  require(options.growth_factor > 1 && std::isfinite(options.growth_factor), "growth_factor", options.growth_factor,
          "more than 1");
  require(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor", options.backoff_factor,
          "a number between 0 and 1");
  require(options.growth_interval >= 1, "growth_interval", static_cast<double>(options.growth_interval), "at least 1");
  core_ = std::make_shared<Core>(options);
}

GradScaler::~GradScaler() = default;

const GradScalerOptions& GradScaler::options() const { return core_->options; }

at::Tensor GradScaler::scale(const at::Tensor& loss) { return loss * core_->use().to(loss.device()); }

double GradScaler::get_scale() const { return core_->next().item<double>(); }

double GradScaler::begin_step(Pipeline& model, bool several_nodes) {
  if (!core_->has_stepped(model.model().loss_scales)) model.wait_losses();
  const MutexLock lock(core_->mutex);
  core_->finish_steps();
  core_->step_scale = core_->of_step({model.model().loss_scales}, several_nodes);
  if (!core_->step_scale.defined()) {
    throw std::invalid_argument(
        "[step] the scaler has scaled no loss yet, expected scaler.scale(loss) in the loss function");
  }
  return core_->step_scale.item<double>();
}

void GradScaler::stepped(Pipeline& model, std::shared_ptr<runtime::StepRun> run) {
  const MutexLock lock(core_->mutex);
  core_->stepped({model.model().loss_scales});
  core_->set_next(core_->scale.current.clone());
  core_->pending.push_back({std::move(run), std::exchange(core_->step_scale, {})});
}

void GradScaler::stepped(Pipeline& model, bool overflowed) {
  const MutexLock lock(core_->mutex);
  core_->forget({model.model().loss_scales});
  core_->scale.grow_or_back_off(core_->options, overflowed);
  core_->set_next(core_->scale.current.clone());
}

void GradScaler::synchronize(Pipeline& model) { core_->settle(model.model().loss_scales); }

GradScaler::State GradScaler::state() {
  const MutexLock lock(core_->mutex);
  core_->finish_steps();
  core_->set_next_unless_waiting(core_->scale.current.clone());
  return {core_->scale.current.item<double>(), core_->waiting_or_next().item<double>(),
          core_->scale.growth_tracker.item<int64_t>()};
}

void GradScaler::load(const State& state) { resume(state, false); }

std::function<GradScaler::State()> GradScaler::later_state() const {
  const MutexLock lock(core_->mutex);
  return [options = core_->options, front = core_->waiting_or_next().item<double>(), scale = core_->scale.copy(),
          pending = core_->pending]() mutable {
    // The caller's interrupts are not those of the thread that asks.
    for (; !pending.empty(); pending.pop_front()) {
      const Core::Pending& step = pending.front();
      device::wait_unless_lost(*step.run->decided());
      if (const std::exception_ptr error = step.run->decided()->error()) std::rethrow_exception(error);
      scale.follow(options, step.run->overflowed(), step.used);
    }
    return State{scale.current.item<double>(), front, scale.growth_tracker.item<int64_t>()};
  };
}

void GradScaler::resume(const State& state, bool losses_wait) {
  const MutexLock lock(core_->mutex);
  core_->finish_steps();
  core_->scale = {scalar(state.scale), at::full({}, state.growth_tracker, at::kInt)};
  core_->restart(scalar(state.front), losses_wait);
}

}  // namespace roundpipe
