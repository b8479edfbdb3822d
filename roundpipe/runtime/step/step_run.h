#pragma once

#include <memory>
#include <vector>

#include <roundpipe/memory/parameter_block.h>
#include <roundpipe/optim/block_optimizer.h>
#include <roundpipe/runtime/model/model_state.h>
#include <roundpipe/runtime/step/update_thread.h>

namespace roundpipe::runtime {

struct StepOptions {
  bool asynchronous = true;
  // Gradients whose norm over the whole model is larger are scaled down to it; not positive: they are taken as they
  // are.
  double max_norm = 0;
  // What the losses were multiplied with; a gradient that is then inf or NaN makes the whole step change nothing.
  // 0: not scaled, not looked at.
  double loss_scale = 0;
};

// One block in one step.
struct BlockStep {
  BlockState* block = nullptr;
  optim::BlockOptimizer* optimizer = nullptr;
  size_t layer = 0;  // the block's first, counted over all models of the step
  memory::GradientBlockPtr gradients;
  memory::WeightVersionPtr before;
  memory::WeightVersionPtr after;
  std::vector<size_t> written;  // parameters that the user has written into since the last step
  double squares = 0;           // of the gradients, once they have been looked at
  double emulated_ms = 0;       // what the update is pretended to take; 0: it is made
  // StepRun's own.
  UpdateThread::Work measure_work;
  UpdateThread::Work update_work;
  std::exception_ptr error;  // why it cannot be made; nothing of the above may be looked at then
};

// One step of a fused optimizer, from gradients that may still be on their way to published weights.
//
// Each block is updated when its gradients have landed and the update before it is done, lowest layer first when
// several wait. With a norm to clip or a scale to check, all gradients are looked at first, each as it lands. A step
// whose gradients never come (their call failed) leaves what it has not updated yet as it is.
//
// What goes wrong fails the step: where nothing has been updated yet, as nothing could be decided, all weights stay as
// they are; a block whose update has begun has no weights any more, and calls that would read it fail.
// Thread safety: start once; waiting and asking from any thread.
class StepRun : public std::enable_shared_from_this<StepRun> {
 public:
  // `owner` keeps the blocks and their optimizers alive.
  StepRun(uint64_t number, std::vector<BlockStep> blocks, std::vector<optim::Hyperparameters> groups,
          const StepOptions& options, std::shared_ptr<void> owner);

  // Never throws: what keeps the step from being made fails it.
  void start() noexcept;

  // Fires when it is known whether the step is skipped and what the norm is; fails when that cannot be known.
  const device::EventPtr& decided() const { return decided_; }
  // Fires when every block is published; fails when that could not be, or the step could not be decided.
  const device::EventPtr& finished() const { return finished_; }

  // The norm of all gradients, unscaled, before clipping; NaN where it was not asked for, or not all came. REQUIRES:
  // decided.
  double norm() const { return norm_; }
  // Whether a gradient was inf or NaN, so that nothing changes. REQUIRES: decided.
  bool overflowed() const { return overflowed_; }
  // How many blocks were updated, and how many were not because their gradients' call failed. REQUIRES: finished.
  int updated_blocks() const { return updated_; }
  int abandoned_blocks() const { return abandoned_; }

 private:
  using Part = void (StepRun::*)(BlockStep&);
  void prepare(bool look_first);
  void wait_to_run(BlockStep& step, bool look_first);
  void hand_in(UpdateThread::Work& work, Part part, BlockStep& step) noexcept;
  void give_up(const std::exception_ptr& error);
  // On the update thread.
  void measure(BlockStep& step);
  void decide();
  void update(BlockStep& step);
  void publish(BlockStep& step);
  void make(BlockStep& step);
  static void pass_on(BlockStep& step);
  void note(const std::exception_ptr& error);

  const uint64_t number_;
  std::vector<BlockStep> blocks_;
  const std::vector<optim::Hyperparameters> groups_;
  const StepOptions options_;
  std::shared_ptr<void> owner_;
  const device::EventPtr decided_ = device::make_event();
  const device::EventPtr finished_ = device::make_event();
  // The update thread's until the event that they are asked after.
  optim::GradientScaling scaling_;
  size_t to_measure_ = 0;
  size_t to_update_ = 0;
  bool gradients_failed_ = false;
  bool overflowed_ = false;
  double norm_;
  int updated_ = 0;
  int abandoned_ = 0;
  std::exception_ptr error_;  // the first
};

}  // namespace roundpipe::runtime
