#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <roundpipe/optim/block_optimizer.h>
#include <roundpipe/runtime/pipeline.h>
#include <roundpipe/runtime/step/step_run.h>
#include <roundpipe/storage/disk_options.h>
#include <roundpipe/storage/division.h>

namespace roundpipe::runtime {

// The fused optimizer of one or more models. It makes the next version of each block's weights in the memory of the
// block's gradients.
//
// Thread safety: the caller's thread, like the pipelines; updates run on the update thread.
class ModelOptimizer {
 public:
  // `groups`: for each pipeline, block and parameter, the group that it belongs to; -1 if it is not trained. Throws
  // std::invalid_argument for a parameter that cannot be trained this way, and for settings of the environment with
  // which updates cannot be computed; then nothing has been changed.
  // `nodes`: processes that make an optimizer of the same models, and then the same steps, each after batches of its
  // own, or none; see StepRun. Each has the state of its shard of each block. Null: there is one.
  ModelOptimizer(std::vector<std::shared_ptr<Pipeline>> pipelines,
                 const std::vector<std::vector<std::vector<int>>>& groups, optim::Algorithm algorithm,
                 optim::StateFormat format, std::shared_ptr<cluster::Nodes> nodes = nullptr);

  // Finds a place for the state: what memory has no room for is on a disk; see storage::divide. `groups`: what they
  // will be in the first step. Masters are prepared, and nothing is changed before take_masters(). Throws what
  // storage::divide, storage::DiskTier and BlockOptimizer::prepare_masters do. REQUIRES: no step has been made.
  void place_state(const DiskOptions& disk, const std::vector<optim::Hyperparameters>& groups);
  // Makes the masters that are prepared those of the models. REQUIRES: place_state(), and give_up_masters() of an
  // earlier optimizer of the models.
  void take_masters();
  // Lets a snapshot have what a later optimizer is going to change.
  void give_up_masters();
  // Null: all is in memory.
  const std::shared_ptr<storage::DiskTier>& disk_tier() const { return disk_; }

  // Starts a step with the gradients summed since the last one; `groups` are the hyperparameters of each group, and
  // `loss_scale` is that of the losses, see StepRun: `options.scaler` is not looked at. At most
  // two steps are in progress, so it may wait for one unless make_room() has. Throws the error of an earlier step or
  // call, or std::invalid_argument if the user has written to weights that a step in progress replaces, or if gradients
  // are used at once (ModelState::gradient_room) and the step needs all of them; then no step has been started. With
  // several nodes, the error of a call is thrown after a step that tells the other nodes.
  std::shared_ptr<StepRun> step(std::vector<optim::Hyperparameters> groups, const StepOptions& options,
                                double loss_scale = 0);

  // Drops the gradients summed since the last step, as they land, and returns their norm, by which a step with
  // ClipBy::kMeasuredNorm clips. Models are as before the calls that made them, see Pipeline::undo. Blocks. Throws the
  // error of an earlier step or call, or std::invalid_argument if gradients are not used at once, if there are none, or
  // with several nodes.
  double measure_gradients();

  // Lets the state have what the user has written to parameters since the last step, and gradients what lies beside
  // them, as the next step would.
  void take_writes();

  // The norm of the gradients of the last step that has been waited for, for the next one that clips by it; none: it
  // was not measured.
  std::optional<double> last_norm() const { return last_norm_; }
  void set_last_norm(std::optional<double> norm) { last_norm_ = norm; }

  // Waits for all steps and lets calls read the newest weights. Values that the user has assigned since (`.data =`)
  // stay. Throws the error of a step, or of writing to a disk, see DiskTier::raise.
  void finish();

  // Waits until a step can be started without waiting. Throws the error of an earlier step.
  void make_room();

  // Null: there is one node.
  const std::shared_ptr<cluster::Nodes>& nodes() const { return nodes_; }

  // Where a parameter is: its block, counted over all pipelines, and its index there. Throws std::out_of_range for one
  // that no pipeline has.
  struct Place {
    size_t block = 0;
    size_t parameter = 0;
  };
  Place place(const at::Tensor& parameter) const { return places_.at(parameter.unsafeGetTensorImpl()); }
  // Block `index`, counted over all pipelines. REQUIRES: no step is in progress.
  optim::BlockOptimizer& block(size_t index) { return blocks_->at(index)->optimizer; }
  // Restarts masters from the weights that these parameters of a block show.
  void restart_masters(size_t block, const std::vector<size_t>& parameters);
  // Treats the current weights as those of the masters, not as written by the user: for example, both have been loaded.
  void accept_weights();

  // A block as the steps begun so far leave it.
  struct BlockContents {
    const BlockState* state = nullptr;
    optim::BlockOptimizer* optimizer = nullptr;
    memory::WeightVersionPtr newest;  // the weights after the last step; may still be being made
    memory::WeightVersionPtr read;    // the weights that calls read, if those are not the newest: an asynchronous step
    memory::GradientBlockPtr gradients;  // that no step has taken and `.grad` does not show, perhaps in flight; or null
  };
  size_t block_count() const { return blocks_->size(); }
  BlockContents contents(size_t index) const;
  // `reader` is told before the next step changes the block, and is then forgotten; null: nobody is.
  void set_reader(size_t index, std::shared_ptr<StateReader> reader);
  // The last step that has been begun; null if all have finished without an error.
  std::shared_ptr<StepRun> last_step() const { return runs_.empty() ? nullptr : runs_.back(); }
  // Begins newer weights, which calls read after the next step, as after an asynchronous step. Returns a tensor for
  // each parameter, to be filled before anything else is called. REQUIRES: no step is in progress, and finish() was
  // called after the last one.
  std::vector<at::Tensor> load_next_weights(size_t index);

  // Drops the gradients that no step has consumed. Nothing blocks.
  void drop_gradients();

  // What the models and their optimizer take of the host.
  struct HostBytes {
    int64_t parameters = 0;  // number of trained parameters
    int64_t weights_and_gradients = 0;
    int64_t remainders = 0;
    int64_t moments = 0;
    int64_t moments_on_disk = 0;     // beyond those
    int64_t remainders_on_disk = 0;  // beyond those
  };
  HostBytes host_bytes(const std::vector<optim::Hyperparameters>& groups) const;
  // The same with the hyperparameters of the latest step or, before it, of set_groups().
  HostBytes host_bytes() const { return host_bytes(groups_); }
  void set_groups(std::vector<optim::Hyperparameters> groups) { groups_ = std::move(groups); }

 private:
  // One block of one pipeline's model. Steps use it and keep it alive. `number`: counted over all pipelines.
  struct BoundBlock {
    BoundBlock(std::shared_ptr<ModelState> of, size_t index, size_t number, size_t layers_before,
               std::vector<int> groups, optim::Algorithm algorithm, optim::StateFormat format,
               const cluster::Nodes* nodes);

    // Parameters that the user has written to since `seen` was taken.
    std::vector<size_t> written() const;
    void see();
    // Of these parameters, and of those for which it has failed, from the newest weights, which are complete.
    void restart_masters(const std::vector<size_t>& written);
    // Throws std::invalid_argument if there are such parameters and the next version replaces them; forgets them then.
    void refuse_lost_writes();

    const std::shared_ptr<ModelState> model;
    BlockState& state;
    const size_t index;  // in the model
    const size_t layer;  // its first layer, counted over all models
    const double emulated_ms;
    const std::optional<cluster::BlockShards> shards;  // with several nodes
    optim::BlockOptimizer optimizer;
    std::shared_ptr<StateReader> reader;  // caller's thread only
    bool stepped = false;                 // whether a step has been begun; caller's thread only
    std::vector<uint32_t> seen;           // versions of the user's parameters at the last look; caller's thread only
  };
  using Blocks = std::vector<std::unique_ptr<BoundBlock>>;
  // See ParameterBlock::adopt_replaced, of every block.
  void adopt_replaced();
  // Of parameters that the user has written to, where the newest weights have what is written.
  void restart_masters();
  // Throws the error of a write to the disk, see DiskTier::raise.
  void raise_disk();
  void reap(size_t at_most);
  bool at_once() const;
  bool has_gradients() const;
  void check_at_once(const StepOptions& options, double loss_scale) const;
  // What measure_gradients() has found, and the losses of each pipeline's call, by microbatch.
  using Losses = std::vector<std::vector<at::Tensor>>;
  struct Measured {
    double norm;
    std::vector<Losses> losses;
  };
  // Of each pipeline, the call whose gradients no step has taken; null: there is none.
  std::vector<CallPtr> calls_of_gradients() const;
  // REQUIRES: they are there.
  static std::vector<Losses> losses_of(const std::vector<CallPtr>& calls);
  // Throws std::invalid_argument unless the losses, for which it waits, are those that were measured.
  void require_measured_batch() const;
  std::shared_ptr<StepRun> run_step(std::vector<optim::Hyperparameters> groups, const StepOptions& options,
                                    double loss_scale, const std::exception_ptr& failure);

  const std::vector<std::shared_ptr<Pipeline>> pipelines_;
  const std::shared_ptr<cluster::Nodes> nodes_;
  const std::shared_ptr<Blocks> blocks_;
  std::unordered_map<const c10::TensorImpl*, Place> places_;
  std::shared_ptr<storage::DiskTier> disk_;  // null: all state is in memory
  storage::Division division_;               // by block, if there is a disk
  uint64_t turn_ = 0;                        // steps begun
  std::vector<optim::Hyperparameters> groups_;
  std::deque<std::shared_ptr<StepRun>> runs_;  // oldest first
  std::optional<double> last_norm_;
  std::optional<Measured> measured_;  // until the next step
};

}  // namespace roundpipe::runtime
