#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <roundpipe/cluster/block_exchange.h>
#include <roundpipe/cluster/nodes.h>
#include <roundpipe/memory/parameter_block.h>
#include <roundpipe/optim/block_optimizer.h>
#include <roundpipe/runtime/model/model_state.h>
#include <roundpipe/runtime/step/state_reader.h>
#include <roundpipe/runtime/step/step_options.h>
#include <roundpipe/runtime/step/update_thread.h>

namespace roundpipe::runtime {

// One block in one step.
struct BlockStep {
  ModelState* model = nullptr;
  BlockState* block = nullptr;
  optim::BlockOptimizer* optimizer = nullptr;
  size_t layer = 0;  // the block's first layer, counted over all models of the step
  memory::GradientBlockPtr gradients;
  memory::WeightVersionPtr before;
  memory::WeightVersionPtr after;
  std::vector<size_t> written;          // parameters that the user has written into since the last step
  std::vector<double> squares;          // of the gradients, once measured: BlockOptimizer::sums_of_squares
  double emulated_ms = 0;               // how long the update is pretended to take; 0: it is really made
  UpdateMeter* meter = nullptr;         // learns how long the update takes; null: the first one, which sets up more
  double measured_ms = 0;               // that measuring the gradients took
  std::shared_ptr<StateReader> reader;  // of the state before this step; may be null
  // With several nodes.
  const cluster::BlockShards* shards = nullptr;
  size_t number = 0;  // of the block, counted over all models

  // Used by StepRun only.
  device::EventPtr summed;  // with several nodes: `gradients` are those of all nodes, or exchange_error is set
  device::EventPtr made;    // with several nodes: `after` has this node's shard; fails if it could not be made
  std::exception_ptr exchange_error;
  bool abandoned = false;  // with several nodes: gradients of this block or of one exchanged before it failed
  bool changes = false;    // with several nodes: some node has gradients, and none failed
  UpdateThread::Work measure_work;
  UpdateThread::Work update_work;
  bool updated = false;
  std::exception_ptr error;  // why the update cannot be made; do not use the members above then
};

// One step of a fused optimizer, from gradients that may still be in flight to published weights.
//
// Each block is updated when its gradients have landed and its previous update is done; if several are ready, the
// lowest layer goes first. To clip by the norm or to check a loss scale, all gradients are measured first, each as it
// lands. If the call of some gradients failed, the step leaves the blocks that it has not yet updated unchanged.
//
// With several nodes, each block's gradients are exchanged, last block first, on a thread of the nodes' gradients, and
// each node measures and updates its shard; new weights are gathered, first block first, on a thread of the nodes'
// weights, and published then. Gradients that are used at once let weights be gathered last block first, too, since
// they are in the same memory. Every node makes the same decisions. If a call failed on one of them, the step fails on
// the others.
//
// Any error fails the step. If the step could not be decided, nothing has been updated and all weights stay as they
// are. A block whose own update failed has no weights any more, and calls that would read it fail; one whose state the
// disk does not give back stays as it was.
// Thread safety: start() once; waiting and reading from any thread.
class StepRun : public std::enable_shared_from_this<StepRun> {
 public:
  // `number`: greater than those of earlier steps. `loss_scale`: the factor by which the losses were multiplied; if a
  // gradient is then inf or NaN, the whole step changes nothing. 0: losses were not scaled, and gradients are not
  // checked. `owner` keeps the blocks and their optimizers alive. `nodes`: null: there is one node. `turn`: the number
  // of the step of this optimizer, from 1. `at_once`: gradients are used as they land, and measured then unless their
  // norm has been; nothing waits for it, and they are clipped by `given_norm`, if there is one: see ClipBy.
  StepRun(uint64_t number, std::vector<BlockStep> blocks, std::vector<optim::Hyperparameters> groups,
          const StepOptions& options, double loss_scale, std::shared_ptr<void> owner,
          std::shared_ptr<cluster::Nodes> nodes = nullptr, uint64_t turn = 0, bool at_once = false,
          std::optional<double> given_norm = std::nullopt);

  // Never throws: an error that keeps the step from starting fails it.
  void start() noexcept;

  // Fires when it is known whether the step is skipped; fails if that cannot be known.
  const device::EventPtr& decided() const { return decided_; }
  // Whether the norm is known only when the step has finished.
  bool measures_late() const { return at_once_ && max_norm_ > 0 && !is_measured_; }
  // What the next step clips by if it goes by this one's norm; none: it was not measured. REQUIRES: finished.
  std::optional<double> norm_for_next() const;
  // Fires when the norm is known; fails if it never will be.
  const device::EventPtr& measured() const { return measures_late() ? finished_ : decided_; }
  // Fires when every block is published; fails if one could not be, or if the step could not be decided.
  const device::EventPtr& finished() const { return finished_; }

  // The norm of all gradients, unscaled, before clipping; NaN if it was not needed, or if some gradients failed.
  // REQUIRES: measured.
  double norm() const { return norm_; }
  // Whether a gradient was inf or NaN, so that the step changes nothing. REQUIRES: decided.
  bool overflowed() const { return overflowed_; }
  // The number of updated blocks, and of blocks that were not updated because a call with gradients of the step failed.
  // REQUIRES: finished.
  int updated_blocks() const { return updated_; }
  int abandoned_blocks() const { return abandoned_; }

 private:
  using Part = void (StepRun::*)(BlockStep&);
  void prepare();
  void wait_to_run(BlockStep& step);
  void hand_in(UpdateThread::Work& work, Part part, BlockStep& step) noexcept;
  void fail_all(const std::exception_ptr& error);
  // On the update thread.
  void measure(BlockStep& step);
  void decide();
  void update(BlockStep& step);
  void publish(BlockStep& step);
  void make(BlockStep& step);
  void compute(BlockStep& step);
  static void pass_on(BlockStep& step);
  void expect_states();
  void note(const std::exception_ptr& error);
  void finish(BlockStep& step);
  bool is_left_out(const BlockStep& step) const;
  void set_clip(float norm);
  bool looks_first() const { return !at_once_ && (max_norm_ > 0 || loss_scale_ > 0); }
  void take_squares(BlockStep& step);
  // Of several nodes: hand in the work below, which runs on the nodes' threads.
  void start_exchange();
  void exchange(BlockStep& step);
  void agree();
  void sum_squares(cluster::Nodes::Link link);
  void gather(BlockStep& step);
  void end_gathering();
  void note_failed_nodes();
  cluster::Turn turn_of(const BlockStep& step, const char* what) const;

  const uint64_t number_;
  std::vector<BlockStep> blocks_;
  const std::vector<optim::Hyperparameters> groups_;
  const double max_norm_;  // 0: none
  const double loss_scale_;
  const double gradient_factor_;
  std::shared_ptr<void> owner_;
  const std::shared_ptr<cluster::Nodes> nodes_;
  const uint64_t turn_;
  const bool at_once_;
  const bool is_measured_;                                  // the given norm is that of these gradients
  const device::EventPtr measured_ = device::make_event();  // with several nodes: every block, here
  const device::EventPtr decided_ = device::make_event();
  const device::EventPtr finished_ = device::make_event();
  // Used by the update thread, until the event after which they may be read has fired. With several nodes, decide()
  // runs on the gradients' thread, and finish() and note() on the weights' thread, after the update thread's part.
  optim::GradientScaling scaling_;
  size_t to_measure_ = 0;
  size_t to_update_ = 0;
  bool gradients_failed_ = false;
  bool overflowed_ = false;
  double norm_;
  int updated_ = 0;
  int abandoned_ = 0;
  std::exception_ptr error_;  // the first
  // Used by the thread of the nodes' gradients, and read after the events of the blocks.
  std::vector<int> failed_nodes_;
};

}  // namespace roundpipe::runtime
