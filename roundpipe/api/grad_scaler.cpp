#include <roundpipe/api/grad_scaler.h>

#include <cmath>
#include <stdexcept>

#include <ATen/TensorOperators.h>

#include <roundpipe/core/error.h>
#include <roundpipe/training/scale_moves.h>

namespace roundpipe {

namespace {

void require(bool holds, const char* name, double value, const char* expected) {
  if (holds) return;
  throw std::invalid_argument(concat("[GradScaler] ", name, " is ", value, ", expected ", expected));
}

const GradScalerOptions& checked(const GradScalerOptions& options) {
  require(options.init_scale > 0 && std::isfinite(options.init_scale), "init_scale", options.init_scale,
          "a positive number");
  require(options.growth_factor > 1 && std::isfinite(options.growth_factor), "growth_factor", options.growth_factor,
          "more than 1");
  require(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor", options.backoff_factor,
          "a number between 0 and 1");
  require(options.growth_interval >= 1, "growth_interval", static_cast<double>(options.growth_interval), "at least 1");
  return options;
}

GradScaler::State state_of(const ScaleState& state) { return {state.scale, state.front, state.growth_tracker}; }

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(checked(options)), moves_(std::make_shared<ScaleMoves>()) {}

GradScaler::~GradScaler() = default;

const GradScalerOptions& GradScaler::options() const { return options_; }

ScaleMoves& GradScaler::started() const {
  moves_->start(options_.init_scale, /*growth_tracker=*/0);
  return *moves_;
}

ScaleRule GradScaler::rule() const {
  return {options_.growth_factor, options_.backoff_factor, options_.growth_interval};
}

at::Tensor GradScaler::scale(const at::Tensor& loss) { return loss * started().use().to(loss.device()); }

double GradScaler::get_scale() const {
  return moves_->started() ? moves_->next().item<double>() : static_cast<float>(options_.init_scale);
}

GradScaler::State GradScaler::state() { return state_of(started().state()); }

void GradScaler::load(const State& state) { resume(state, /*losses_wait=*/false); }

std::function<GradScaler::State()> GradScaler::later_state() const {
  return [later = started().later_state()] { return state_of(later()); };
}

void GradScaler::resume(const State& state, bool losses_wait) {
  moves_->resume({state.scale, state.front, state.growth_tracker}, losses_wait);
}

}  // namespace roundpipe
