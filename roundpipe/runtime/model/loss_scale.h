#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/mutex.h>

namespace roundpipe::runtime {

class LossScale;

// The scalers that belong to a model, which they know by this. Thread safety: any thread.
class LossScales {
 public:
  // Those that live.
  std::vector<std::shared_ptr<LossScale>> all() const;
  bool any() const { return !all().empty(); }
  bool has(const LossScale& scale) const;
  void add(const std::shared_ptr<LossScale>& scale);

 private:
  mutable Mutex mutex_;
  std::vector<std::weak_ptr<LossScale>> scales_ ROUNDPIPE_GUARDED_BY(mutex_);
};

// By what a GradScaler multiplies losses: a () fp32 tensor on the host that is replaced, never changed.
//
// Losses are scaled on devices while an earlier step may still be deciding the next scale. So the scale of a loss
// changes only where the program says so: all losses of a model between two steps have the scale of the first of them,
// or that of set_next() when their call was submitted.
//
// A scaler belongs to the models in whose calls it has scaled a loss or whose optimizer it has stepped, as long as it
// lives. Losses outside of calls belong to the next step that uses it.
// Thread safety: any thread.
class LossScale : public std::enable_shared_from_this<LossScale> {
 public:
  using ModelPtr = std::shared_ptr<LossScales>;

  explicit LossScale(at::Tensor first) : next_(std::move(first)) {}
  virtual ~LossScale() = default;
  LossScale(const LossScale&) = delete;
  LossScale& operator=(const LossScale&) = delete;

  // The scale of a loss that this thread makes. The loss then waits for a step.
  at::Tensor use();
  // What use() would return here.
  at::Tensor next() const;

  // Of the models of one step, before it is made: the scale of the losses that wait. If none does: of the last ones,
  // undefined without any; or that of the next ones with several nodes, of which others may have had losses. The scaler
  // belongs to the models from now on. Throws std::invalid_argument if losses wait that have several scales.
  at::Tensor of_step(const std::vector<ModelPtr>& models, bool several_nodes = false);
  // The scaler belongs to the models from now on.
  void belong_to(const std::vector<ModelPtr>& models);
  // Whether a step of the model has used the scaler: calls that were submitted before may not have reserved its scale,
  // so that their losses, not just the first of them, have to be made before the scale moves.
  bool has_stepped(const ModelPtr& model) const;
  // The step was made: none of those losses waits any more.
  void stepped(const std::vector<ModelPtr>& models);
  // The same of the losses outside of calls, if there were so many when the step was made: it may show later that a
  // step has used the scaler.
  void stepped_outside(uint64_t losses);
  // How many losses outside of calls there were.
  uint64_t outside_losses() const;
  // As stepped(); nor are those losses the last ones of a later step.
  void forget(const std::vector<ModelPtr>& models);
  // Losses that no other one of their step came before have this scale from now on.
  void set_next(at::Tensor scale);
  // The same, unless a loss of these models, or one outside of calls, waits.
  void set_next_unless_waiting(const std::vector<ModelPtr>& models, at::Tensor scale);
  // The same, unless any loss waits.
  void set_next_unless_waiting(at::Tensor scale);
  // Forgets all losses so far; the next ones have this scale. `waits`: losses with it, outside of calls, wait.
  void restart(at::Tensor scale, bool waits = false);
  // The scale of a loss that waits, whichever model it is of, or else the next one's.
  at::Tensor waiting_or_next() const;

  // The scale that follows from an update from `before` to `after`, after a step whose losses had the scale `used`: an
  // overflow backs off from the scale that caused it, from which an earlier step may have backed off already.
  static at::Tensor after_step(const at::Tensor& before, const at::Tensor& after, const at::Tensor& used,
                               double backoff_factor);

  // Waits until earlier steps have decided the scale, which the next losses of `model` then have.
  virtual void settle(const ModelPtr& /*model*/) {}

  // The scales of a call's losses, as of its submission, of the scalers that the model has then. Keeps no scaler.
  using Reserved = std::vector<std::pair<std::weak_ptr<LossScale>, at::Tensor>>;
  static Reserved reserve(const ModelPtr& model);

  // While it lives, this thread runs a call of `model`. Must not be moved.
  class Scope {
   public:
    Scope(const ModelPtr& model, const Reserved& reserved);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

    // Whether this thread has scaled a loss of the call that it runs since the last question; false outside of calls.
    static bool take_scaled();

   private:
    friend class LossScale;
    const ModelPtr& model_;
    const Reserved& reserved_;
    Scope* const outer_;
    bool scaled_ = false;
  };

 private:
  struct Losses {
    at::Tensor scale;  // of the last ones; undefined: there were none
    bool wait = false;
  };
  struct ModelLosses : Losses {
    std::weak_ptr<LossScales> model;
    bool stepped = false;
  };
  at::Tensor use(const ModelPtr& model);
  // What the call that this thread runs has reserved of this scaler; undefined: nothing.
  at::Tensor reserved() const;
  // Those of a model; null: those outside of calls.
  Losses& of(const ModelPtr& model) ROUNDPIPE_REQUIRES(mutex_);
  ModelLosses& of_model(const ModelPtr& model) ROUNDPIPE_REQUIRES(mutex_);
  const Losses* find(const ModelPtr& model) const ROUNDPIPE_REQUIRES(mutex_);
  // Those that the next step of `models` consumes.
  std::vector<const Losses*> of_next_step(const std::vector<ModelPtr>& models) const ROUNDPIPE_REQUIRES(mutex_);

  mutable Mutex mutex_;
  at::Tensor next_ ROUNDPIPE_GUARDED_BY(mutex_);
  Losses outside_ ROUNDPIPE_GUARDED_BY(mutex_);
  uint64_t outside_losses_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  std::vector<ModelLosses> of_models_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace roundpipe::runtime
