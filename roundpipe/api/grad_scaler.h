#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

namespace roundpipe {

class ScaleMoves;
struct ScaleRule;

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;     // of the scale, after growth_interval steps without inf or NaN; above 1
  double backoff_factor = 0.5;  // of the scale, after a step with inf or NaN; below 1
  int64_t growth_interval = 2000;
};

// Loss scaling for 16-bit gradients, with the arithmetic of torch.amp.GradScaler: losses are multiplied by a scale,
// gradients are divided by it before a step, a step with inf or NaN changes nothing, and the scale follows.
//
// Losses may be scaled on devices while an earlier step is still deciding the next scale, so the program decides the
// scale of every loss, and timing never does: see runtime::LossScale. A new scale reaches the losses one step later
// after an asynchronous step than after a synchronous one. If an overflow is seen twice in between, the scale backs off
// once.
//
// A scaler belongs to the models in whose calls it has scaled a loss or whose optimizer it has stepped: these no longer
// refuse a NaN loss, since skipping such steps is the scaler's job, and Model::synchronize lets their next losses use
// the newest scale. Nothing else changes while a scaler exists. One scaler for several models: every step updates it.
// Thread safety: scale() and get_scale() from any thread; everything else on the caller's thread. Outlives the calls in
// which it scales losses, and the steps that are given it.
class GradScaler {
 public:
  // Throws std::invalid_argument for a factor on the wrong side of 1, or a number that is not positive.
  explicit GradScaler(const GradScalerOptions& options = {});
  ~GradScaler();
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  // Returns `loss` times the scale. For use in a loss function; of a loss outside of calls, whose backward the program
  // runs itself, at the next step that uses this scaler.
  at::Tensor scale(const at::Tensor& loss);
  // The scale of the next losses: in a loss function, that of this call's.
  double get_scale() const;

  struct State {
    double scale = 0;
    double front = 0;  // of the next losses
    int64_t growth_tracker = 0;
  };
  // The state, once all steps are over (Model::synchronize). Waits for their decisions.
  State state();
  void load(const State& state);
  // The state after the steps that were made so far, to be asked for later and on any thread: it waits for their
  // decisions and throws the error of a step that could not be decided. Taking it waits for nothing.
  std::function<State()> later_state() const;
  // The state of a training that goes on; `losses_wait`: losses were scaled that no step has consumed.
  void resume(const State& state, bool losses_wait);
  const GradScalerOptions& options() const;

  // -- for steps --
  ScaleMoves& moves() const { return *moves_; }
  ScaleRule rule() const;
  // Takes the first scale, if there is none yet; the first loss does it otherwise.
  ScaleMoves& started() const;

 private:
  const GradScalerOptions options_;
  const std::shared_ptr<ScaleMoves> moves_;  // the models that it belongs to refer to it
};

}  // namespace roundpipe
