#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/runtime/step/step_run.h>

namespace roundpipe {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;     // of the scale, after growth_interval steps without inf or NaN; above 1
  double backoff_factor = 0.5;  // of the scale, after a step with inf or NaN; below 1
  int64_t growth_interval = 2000;
};

// Loss scaling for 16-bit gradients, with the arithmetic of torch.amp.GradScaler: losses are multiplied by a scale,
// gradients are divided by it before a step, a step with inf or NaN changes nothing, and the scale follows.
//
// Losses may be scaled on devices while an earlier step is still deciding the next scale, so there are two scales:
// losses use the front one, which moves only at a step. Hence the program decides the scale of every loss, and timing
// never does. A new scale reaches the losses one step later after an asynchronous step than after a synchronous one. If
// an overflow is seen twice in between, the scale backs off once.
//
// While a scaler exists, no model refuses a NaN loss: skipping such steps is the scaler's job.
// Thread safety: scale() from any thread; everything else on the caller's thread. Outlives the steps that are given it.
class GradScaler {
 public:
  // Throws std::invalid_argument for a factor on the wrong side of 1, or a number that is not positive.
  explicit GradScaler(const GradScalerOptions& options = {});
  ~GradScaler();
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  // Returns `loss` times the front scale. For use in a loss function.
  at::Tensor scale(const at::Tensor& loss);
  // The scale of the next losses.
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
  const GradScalerOptions& options() const { return options_; }

  // Whether any scaler exists. Any thread.
  static bool any();

  // -- for steps; the caller's thread --

  // The scale of the losses so far, for a step that is about to be made; later losses use the current scale. Waits for
  // the decisions of earlier steps. Throws std::invalid_argument if no loss has been scaled.
  double begin_step();
  // The step that begin_step() was called for has been started.
  void stepped(std::shared_ptr<runtime::StepRun> run);
  // Updates the scale after a step that is over, as torch's update() does, for losses that used the current scale.
  void update(bool overflowed);
  // Waits for the decisions of all steps. Then the next losses use the current scale, unless losses wait for a step,
  // since all losses of one step share a scale. Throws the error of a step that could not be decided.
  void synchronize();
  static void synchronize_all();

 private:
  struct Pending {
    std::shared_ptr<runtime::StepRun> run;
    at::Tensor scale;
  };
  // What steps decide.
  struct Scale {
    at::Tensor current;  // () fp32, the result of the latest update
    at::Tensor growth_tracker;

    void follow(const GradScalerOptions& options, const std::vector<Pending>& steps);
    void grow_or_back_off(const GradScalerOptions& options, bool overflowed);
  };
  void finish_steps();

  GradScalerOptions options_;
  Scale scale_;            // caller's thread only
  at::Tensor step_scale_;  // of the step that is about to be started
  std::vector<Pending> pending_;
  mutable std::mutex mutex_;
  at::Tensor front_;          // () fp32, replaced, never changed. Protected by mutex_.
  at::Tensor used_;           // the front scale of the latest losses. Protected by mutex_.
  bool losses_wait_ = false;  // losses were scaled since the last step. Protected by mutex_.
};

}  // namespace roundpipe
