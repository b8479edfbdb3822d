#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/mutex.h>
#include <roundpipe/device/event.h>
#include <roundpipe/runtime/model/loss_scale.h>
#include <roundpipe/runtime/pipeline.h>
#include <roundpipe/runtime/step/step_run.h>
#include <roundpipe/training/scale_state.h>

namespace roundpipe {

// What a step decides that another thread makes later.
struct LaterDecision {
  const device::EventPtr over = device::make_event();  // `overflowed` is known
  std::optional<bool> overflowed;                      // none: the step was not made
};

// When the scale of a GradScaler moves, and where to: the arithmetic of torch.amp.GradScaler, for steps that decide
// while later losses are scaled already. So there are two scales: losses have the *front* one (LossScale), and steps
// change the *current* one. The front scale becomes the current one when a step is made, before which the steps so far
// have decided, or when everything is settled, and at no other time: timing never moves it.
//
// A step has three parts: begin_step(), the step itself, stepped(). One that decides by itself changes what current()
// and growth_tracker() return, and calls decided().
// Thread safety: any thread; of what waits, the caller's. Nothing waits with a lock held.
class ScaleMoves : public runtime::LossScale {
 public:
  using Pipelines = std::vector<std::shared_ptr<runtime::Pipeline>>;

  // Has no scale yet.
  ScaleMoves();
  // The first scale, which the first loss needs. Does nothing if there is one.
  void start(double scale, int64_t growth_tracker);
  bool started() const;

  // The scale of the losses that the next step of these models consumes. Waits for the decisions of earlier steps and,
  // of models whose steps have not used the scaler yet, for the losses of their calls. With `several_nodes`, others may
  // have scaled losses. Throws the error of a step that could not be decided, and std::invalid_argument if there is no
  // scale yet, or losses were scaled by several ones.
  at::Tensor begin_step(const Pipelines& models, bool several_nodes);
  // A fused step of losses with the scale `used` was started; `run` decides. `overflowed`: other gradients of the step
  // were inf or NaN.
  void stepped(const Pipelines& models, std::shared_ptr<runtime::StepRun> run, at::Tensor used, const ScaleRule& rule,
               bool overflowed = false);
  // The same for a step that was queued.
  void stepped(const Pipelines& models, std::shared_ptr<const LaterDecision> later, at::Tensor used,
               const ScaleRule& rule);
  // A step was made or queued that decides by itself.
  void stepped(const Pipelines& models);
  // A step is over that was made while nothing else ran.
  void stepped(const Pipelines& models, const ScaleRule& rule, bool overflowed);

  // A step of losses with the scale `used` has moved the current scale, from `before`.
  void decided(const at::Tensor& before, const at::Tensor& used, double backoff_factor);
  // The program moves the current scale after each step, outside of it, and the front scale before that: steps do not
  // move it from now on, but this does.
  void move_outside();
  bool moves_outside() const;
  void set_moves_outside(bool moves);
  // Later losses have the current scale.
  void advance();
  // Forgets the losses so far; the next ones have the current scale.
  void restart_losses();

  // Waits for the decisions of the steps so far. Throws the error of a step that could not be decided, once.
  void finish_steps();
  // The same; then the next losses of these models have the current scale, unless some wait for a step, since all
  // losses of one step share a scale.
  void settle(const Pipelines& models);
  void settle(const ModelPtr& model) override;

  // The result of the latest decision, () fp32 and () int32; undefined before there is a scale. They share the memory,
  // so that torch's class can change it.
  at::Tensor current() const;
  at::Tensor growth_tracker() const;

  // Waits as finish_steps(). If no losses wait, the next ones have the current scale. REQUIRES: started().
  ScaleState state();
  // The state after the steps that were made so far, to be asked for later and on any thread: it waits for their
  // decisions and throws the error of a step that could not be decided. Taking it waits for nothing.
  // REQUIRES: started().
  std::function<ScaleState()> later_state() const;
  // Goes on from a state. `losses_wait`: losses were scaled that no step has consumed.
  void resume(const ScaleState& state, bool losses_wait);

 private:
  // What steps decide.
  struct Scale {
    at::Tensor current;
    at::Tensor growth_tracker;

    Scale copy() const { return {current.clone(), growth_tracker.clone()}; }
    void grow_or_back_off(const ScaleRule& rule, bool overflowed);
    void follow(const ScaleRule& rule, bool overflowed, const at::Tensor& used);
  };
  // A step that was started.
  struct Pending {
    std::shared_ptr<runtime::StepRun> run;  // null: `later` has the decision
    std::shared_ptr<const LaterDecision> later;
    at::Tensor used;
    ScaleRule rule;
    bool overflowed = false;

    device::EventPtr decided() const { return run ? run->decided() : later->over; }
    void decide(Scale& scale) const;
  };

  // Null: there is none.
  device::EventPtr first_decision() const;
  at::Tensor copy_of_current() const;

  mutable Mutex mutex_;
  Scale scale_ ROUNDPIPE_GUARDED_BY(mutex_);  // undefined: there is none yet
  std::deque<Pending> pending_ ROUNDPIPE_GUARDED_BY(mutex_);
  bool moves_outside_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
};

}  // namespace roundpipe
