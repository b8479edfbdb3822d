#include <roundpipe/api/grad_scaler.h>

#include <atomic>
#include <cmath>
#include <set>
#include <stdexcept>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <roundpipe/core/error.h>
#include <roundpipe/device/event.h>

namespace roundpipe {

namespace {

// Never destroyed: scalers may be static objects.
struct Living {
  std::mutex mutex;
  std::set<GradScaler*> scalers;  // protected by mutex
};
Living& living() {
  static auto* instance = new Living;
  return *instance;
}

at::Tensor scalar(double value) { return at::full({}, value, at::kFloat); }

void require(bool holds, const char* name, double value, const char* expected) {
  if (holds) return;
  throw std::invalid_argument(concat("[GradScaler] ", name, " is ", value, ", expected ", expected));
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options), scale_{scalar(options.init_scale), at::zeros({}, at::kInt)}, front_(scale_.current.clone()) {
  require(options.init_scale > 0 && std::isfinite(options.init_scale), "init_scale", options.init_scale,
          "a positive number");
  require(options.growth_factor > 1, "growth_factor", options.growth_factor, "more than 1");
  require(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor", options.backoff_factor,
          "a number between 0 and 1");
  require(options.growth_interval >= 1, "growth_interval", static_cast<double>(options.growth_interval), "at least 1");
  const std::lock_guard lock(living().mutex);
  living().scalers.insert(this);
}

GradScaler::~GradScaler() {
  const std::lock_guard lock(living().mutex);
  living().scalers.erase(this);
}

bool GradScaler::any() {
  const std::lock_guard lock(living().mutex);
  return !living().scalers.empty();
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  at::Tensor scale;
  {
    const std::lock_guard lock(mutex_);
    scale = used_ = front_;
    losses_wait_ = true;
  }
  return loss * scale.to(loss.device());
}

double GradScaler::get_scale() const {
  const std::lock_guard lock(mutex_);
  return front_.item<double>();
}

void GradScaler::Scale::grow_or_back_off(const GradScalerOptions& options, bool overflowed) {
  const at::NoGradGuard no_grad;
  at::_amp_update_scale_(current, growth_tracker, scalar(overflowed ? 1 : 0), options.growth_factor,
                         options.backoff_factor, options.growth_interval);
}

void GradScaler::Scale::follow(const GradScalerOptions& options, const std::vector<Pending>& steps) {
  const at::NoGradGuard no_grad;
  for (const Pending& step : steps) {
    device::wait_interruptible(*step.run->decided());
    const at::Tensor before = current.clone();
    grow_or_back_off(options, step.run->overflowed());
    if (current.item<float>() >= before.item<float>()) continue;
    // inf or NaN, caused by a scale that was too large; an earlier step may have backed off from it already.
    const at::Tensor backed_off = (step.scale.to(at::kDouble) * options.backoff_factor).to(at::kFloat);
    current.copy_(at::minimum(before, backed_off));
  }
}

void GradScaler::finish_steps() { scale_.follow(options_, std::exchange(pending_, {})); }

double GradScaler::begin_step() {
  finish_steps();
  const std::lock_guard lock(mutex_);
  if (!used_.defined()) {
    throw std::invalid_argument(
        "[step] the scaler has scaled no loss yet, expected scaler.scale(loss) in the loss function");
  }
  step_scale_ = used_;
  losses_wait_ = false;
  front_ = scale_.current.clone();
  return step_scale_.item<double>();
}

void GradScaler::stepped(std::shared_ptr<runtime::StepRun> run) { pending_.push_back({std::move(run), step_scale_}); }

void GradScaler::update(bool overflowed) {
  finish_steps();
  scale_.grow_or_back_off(options_, overflowed);
  const std::lock_guard lock(mutex_);
  used_ = at::Tensor();
  losses_wait_ = false;
  front_ = scale_.current.clone();
}

void GradScaler::synchronize() {
  finish_steps();
  const std::lock_guard lock(mutex_);
  if (!losses_wait_) front_ = scale_.current.clone();
}

void GradScaler::synchronize_all() {
  std::set<GradScaler*> scalers;
  {
    const std::lock_guard lock(living().mutex);
    scalers = living().scalers;
  }
  for (GradScaler* const scaler : scalers) scaler->synchronize();
}

GradScaler::State GradScaler::state() {
  synchronize();
  return {scale_.current.item<double>(), get_scale(), scale_.growth_tracker.item<int64_t>()};
}

void GradScaler::load(const State& state) { resume(state, false); }

std::function<GradScaler::State()> GradScaler::later_state() const {
  const std::lock_guard lock(mutex_);
  const double front = (losses_wait_ ? used_ : front_).item<double>();
  return [options = options_, front, scale = Scale{scale_.current.clone(), scale_.growth_tracker.clone()},
          pending = pending_]() mutable {
    // The caller's interrupts are not those of the thread that asks.
    for (const Pending& step : pending) {
      device::wait_unless_lost(*step.run->decided());
      if (const std::exception_ptr error = step.run->decided()->error()) std::rethrow_exception(error);
    }
    scale.follow(options, std::exchange(pending, {}));
    return State{scale.current.item<double>(), front, scale.growth_tracker.item<int64_t>()};
  };
}

void GradScaler::resume(const State& state, bool losses_wait) {
  finish_steps();
  scale_ = {scalar(state.scale), at::full({}, state.growth_tracker, at::kInt)};
  const std::lock_guard lock(mutex_);
  front_ = scalar(state.front);
  used_ = losses_wait ? front_ : at::Tensor();
  losses_wait_ = losses_wait;
}

}  // namespace roundpipe
