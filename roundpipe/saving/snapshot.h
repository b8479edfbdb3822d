#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/mutex.h>
#include <roundpipe/runtime/model_optimizer.h>
#include <roundpipe/saving/snapshot_memory.h>

namespace roundpipe::saving {

// The state of a fused optimizer's blocks after the steps begun so far, written while training goes on.
//
// Neither taking nor writing a snapshot waits for a step. A block that is not written yet when the next step wants to
// change it is copied first, as long as the memory allows; after that, the update waits until the block is written. In
// the same way, the weights that calls read in an asynchronous step are held beyond their time. Blocks that somebody
// waits for are written first.
//
// Parameters must not be written to by other code until write() has returned.
// Thread safety: of() on the caller's thread, wait_ready() and write() once, on any one thread; the rest on any thread.
class Snapshot : public std::enable_shared_from_this<Snapshot> {
 public:
  enum class Part {
    kWeights,    // after the last step
    kPrevious,   // the weights that calls read, if those are of the step before: an asynchronous step
    kRemainder,  // see BlockOptimizer
    kMoment,     // a tensor of the optimizer's state
    kGradient    // summed since the last step
  };
  struct Piece {
    Part part;
    size_t block;      // counted as ModelOptimizer does
    size_t parameter;  // in the block
    size_t moment;     // its index in ParameterState::tensors
    at::Tensor tensor;
  };
  // The counters of one trained parameter that has had a step.
  struct Counters {
    size_t block;
    size_t parameter;
    optim::Scalars scalars;
  };

  // Takes the state of the blocks in which something is trained. `owner` keeps `optimizer` alive. Without
  // `with_weights`, the weights are left out: another node, which has the same ones, writes them.
  static std::shared_ptr<Snapshot> of(runtime::ModelOptimizer& optimizer, std::shared_ptr<SnapshotMemory> memory,
                                      std::shared_ptr<const void> owner, bool with_weights = true);
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // Blocks until the steps begun before of() are finished and the gradients summed then have landed. Throws their
  // error: there is no state to save then.
  void wait_ready();
  // In a fixed order. Their tensors are the reader's to look at, not to read. REQUIRES: wait_ready() has returned.
  const std::vector<Piece>& pieces() const { return pieces_; }
  const std::vector<Counters>& counters() const { return counters_; }
  // See ModelOptimizer::last_norm. REQUIRES: wait_ready() has returned.
  std::optional<double> last_norm() const { return last_norm_; }

  // Calls `sink` with the index of each piece and its tensor, from `threads` threads, and returns when all are done.
  // Rethrows the first error of a sink; the rest is given up then. REQUIRES: wait_ready() has returned.
  using Sink = std::function<void(size_t piece, const at::Tensor& tensor)>;
  void write(const Sink& sink, int threads);
  // Gives up what is not written, so that nobody waits for it; write() then throws Error.
  void cancel();

 private:
  class Reader;
  enum class Stage {
    kLive,     // its tensors are those in use
    kCopying,  // by the update thread
    kSafe,     // copied, or held
    kWriting,
    kOver  // written, or given up
  };
  // Pieces that change together: the weights of the step before, or all else of a block.
  struct Unit {
    Unit(size_t of, bool is_previous) : block(of), previous(is_previous) {}
    const size_t block;  // an index into contents_
    const bool previous;
    const device::EventPtr over = device::make_event();
    // Protected by mutex_; the pieces' tensors by the stage.
    Stage stage = Stage::kLive;
    bool awaited = false;
    bool frozen = false;
    int64_t held_bytes = 0;
    size_t first = 0;  // of its pieces in pieces_, once that is made
    std::vector<Piece> pieces;
    std::vector<Counters> counters;
  };
  struct Block {
    size_t index;  // in the optimizer
    runtime::ModelOptimizer::BlockContents contents;
  };

  Snapshot(runtime::ModelOptimizer& optimizer, std::shared_ptr<SnapshotMemory> memory,
           std::shared_ptr<const void> owner, bool with_weights);
  // Finds the unit's tensors, once. REQUIRES: the steps have updated the block.
  void freeze(Unit& unit) ROUNDPIPE_REQUIRES(mutex_);
  void freeze_state(Unit& unit) ROUNDPIPE_REQUIRES(mutex_);
  void hold(Unit& unit);
  void copy_or_wait(Unit& unit) noexcept;
  void copy(Unit& unit) noexcept;
  bool is_copying() const ROUNDPIPE_REQUIRES(mutex_);
  Unit* next() ROUNDPIPE_REQUIRES(mutex_);
  void work(const Sink& sink) noexcept;
  void finish(Unit& unit) ROUNDPIPE_REQUIRES(mutex_);
  void give_up(const std::exception_ptr& error) noexcept;

  const std::shared_ptr<SnapshotMemory> memory_;
  const std::shared_ptr<const void> owner_;
  const bool with_weights_;
  const std::shared_ptr<runtime::StepRun> step_;  // the last one; null: all have finished
  std::vector<Block> blocks_;                     // in which something is trained; constant
  std::vector<std::unique_ptr<Unit>> units_;      // constant; those of the step before first, in both by block
  std::vector<Piece> pieces_;                     // made by wait_ready()
  std::vector<Counters> counters_;
  std::optional<double> last_norm_;  // set by wait_ready() if the last step has measured it
  Mutex mutex_;
  Condition changed_;
  std::exception_ptr error_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace roundpipe::saving
