#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <roundpipe/core/mutex.h>
#include <roundpipe/memory/gradient_block.h>
#include <roundpipe/memory/parameter_block.h>
#include <roundpipe/runtime/model/layer.h>
#include <roundpipe/runtime/model/loss_scale.h>
#include <roundpipe/runtime/model/parameter_claim.h>
#include <roundpipe/runtime/model/random.h>
#include <roundpipe/runtime/model/resident_copies.h>
#include <roundpipe/runtime/model/shells.h>
#include <roundpipe/runtime/model/update_meter.h>
#include <roundpipe/schedule/layer_cost.h>

namespace roundpipe::optim {
struct Remainders;
}

namespace roundpipe::runtime {

// A property of a layer that is learned by watching it run.
enum class Learned : int { kUnknown, kNo, kYes };

// How frugally a microbatch uses memory. Both ways give the same bits.
enum class Frugality : int {
  kStage,  // the graph of a whole stage at once
  kLayer,  // the graph of one layer at a time
};

// What a layer does in one mode (training or evaluation flags), learned while it runs. Each call keeps the habits of
// the mode in which it was made, since the mode may change while it runs. Thread safety: any thread.
struct LayerHabits {
  explicit LayerHabits(size_t parameters) : touches_parameters(parameters) {}

  SharedDraws shared_draws;
  std::atomic<Learned> writes_inputs{Learned::kUnknown};
  std::atomic<Learned> writes_buffers{Learned::kUnknown};
  // Whether gradients of parameters arrive after the backward has passed the layer. If so, their sums wait for its end.
  std::atomic<Learned> late_gradients{Learned::kUnknown};
  std::atomic<uint64_t> jobs{0};                      // begun
  std::atomic<bool> gradients_in_parts{false};        // a microbatch cannot run again, see GradientSink::can_retry
  std::vector<std::atomic<bool>> touches_parameters;  // [parameter]: see ParameterWatch::touched
};
using LayerHabitsPtr = std::shared_ptr<LayerHabits>;

// One layer of a model, and everything that the engine knows about it.
struct LayerState {
  std::unique_ptr<Layer> layer;
  std::vector<size_t>
      blocks;  // indices into ModelState::blocks: its own first (trainable, frozen, mapped), then shared ones

  // The place of parameter i of the layer: blocks[block] of the model, and the index in that block.
  struct ParameterPlace {
    size_t block;
    size_t index;
  };
  std::vector<ParameterPlace> parameters;

  std::vector<memory::NamedTensor> buffers;
  memory::BlockLayout buffer_layout;

  std::map<uint64_t, LayerHabitsPtr> habits;  // by Layer::mode_key(); caller's thread only
  // How frugally the layer must run: raised when it has run out of memory.
  std::atomic<Frugality> frugality{Frugality::kStage};
  // Fires when the buffers hold the result of the last submitted forward; caller's thread only.
  device::EventPtr buffers_current;
};

// A parameter block and the layers that use it.
struct BlockState {
  BlockState(std::vector<memory::NamedTensor> parameters, std::vector<int> layers, bool pinned);

  std::unique_ptr<memory::ParameterBlock> block;
  std::vector<int> layers;  // ascending; more than one when tied
  // The layout of gradients on the host, and the pool of their memory: those of the weights, unless kept in fp32.
  memory::BlockLayout gradient_layout;
  std::shared_ptr<memory::BufferPool> gradient_buffers;
  // The layout of partial sums, and the pool of their memory, which is that of the gradients if the dtypes are the
  // same.
  memory::BlockLayout sum_layout;
  std::shared_ptr<memory::BufferPool> sum_buffers;
  // Of the parameters' fp32 masters, once a fused optimizer trains the block.
  std::shared_ptr<optim::Remainders> remainders;

  bool tied() const { return layers.size() > 1; }
  // The position of `layer` among the layers that share the block. REQUIRES: it is one of them.
  size_t sharer(int layer) const {
    return static_cast<size_t>(std::find(layers.begin(), layers.end(), layer) - layers.begin());
  }
  // Whether any parameter is trainable, by the user's current flags.
  bool trainable() const;
  // Host bytes of so many partial sums, beyond those of the gradients; 0 if nothing is trainable.
  int64_t sum_bytes(int64_t parts) const;
  // How one job that has all of its layers sends their gradients; nothing if they are not tied, or nothing is
  // trainable.
  JoinedGradients joined() const;
  // From now on, 16-bit weights have fp32 gradients on the host. REQUIRES: no gradient has been made yet.
  void keep_gradients_in_fp32();

 private:
  void make_sum_buffers();
};

// The host side of a model: layers, parameters, and the gradients summed by the calls since the last step.
// Ownership: owns the layers, which keep the user's modules alive.
// Thread safety: built and changed on the caller's thread; workers read.
struct ModelState {
  // Throws std::invalid_argument if there are no layers, for a tensor that is not on the CPU, and for a parameter that
  // another model has, unless this one is made `in_place_of` it.
  ModelState(std::string name, std::vector<std::unique_ptr<Layer>> layers, bool pinned,
             const ModelState* in_place_of = nullptr);

  std::string name;
  std::vector<std::unique_ptr<LayerState>> layers;
  std::vector<BlockState> blocks;
  SharedDraws loss_shared_draws;  // of the loss functions that this model is called with
  // Of the scalers that belong to it.
  const std::shared_ptr<LossScales> loss_scales = std::make_shared<LossScales>();
  UpdateMeter updates;                    // of its weights on the host
  Shells shells;                          // on the workers of the pool that its calls run on
  ResidentCopies residents;               // likewise
  std::atomic<int64_t> verified_jobs{0};  // jobs that had the same bits on another device, see JobCheck
  // Bytes that a device needs for a job, at most, beside its weights; 0 = not known.
  std::atomic<int64_t> work_bytes{0};
  // One for each block; null = nothing summed. Caller's thread only.
  std::vector<memory::GradientBlockPtr> gradients;
  // Of gradients that a step uses as they land; null: there is a place for each.
  memory::GradientRoomPtr gradient_room;
  // To the parameters. Once it is lost, the blocks leave them alone.
  std::unique_ptr<ParameterClaim> claim;

  int layer_count() const { return static_cast<int>(layers.size()); }
  // Whether each parameter is trainable, by the user's current flags: [layer][parameter].
  std::vector<std::vector<char>> trainable() const;
  // Records a notice for the user, unless it is empty. Only the first one of its kind counts. Any thread.
  enum class Notice { kOutOfMemory, kLoss };
  void notify(Notice kind, std::string notice);
  // Returns the recorded notices and clears them.
  std::vector<std::string> take_notices();
  // Records that a step has updated these layers, and no others, because a call with gradients of it failed. Any
  // thread.
  void torn(const std::vector<int>& layers);
  // Returns the recorded layers, ascending, and clears them.
  std::vector<int> take_torn_layers();
  // Layer::hold() of the first layer that has one, to be kept while all layers are asked.
  std::shared_ptr<const void> hold() const;
  // From now on, gradients have room for a few blocks at a time, and blocks of one size share their memory.
  // `is_bounded`: false: each has a place of its own again. REQUIRES: nothing is under way.
  void bound_gradients(bool is_bounded);
  // The habits of each layer in its current mode, which is read from the layers' mode keys. Caller's thread.
  std::vector<LayerHabitsPtr> habits_of_now();
  // Host memory of the blocks' pools. Throws Error in a process that is left behind.
  int64_t host_bytes() const;

 private:
  Mutex notice_mutex_;
  std::vector<std::string> notices_ ROUNDPIPE_GUARDED_BY(notice_mutex_);
  std::set<Notice> noticed_ ROUNDPIPE_GUARDED_BY(notice_mutex_);
  std::set<int> torn_ ROUNDPIPE_GUARDED_BY(notice_mutex_);
};

// The places of the weights and buffers of consecutive layers in one slot.
struct StageLayout {
  struct LayerPlace {
    std::vector<int64_t> blocks_at;  // byte offset of each of LayerState::blocks; -1: not in the slot
    int64_t buffers_at = 0;
  };
  std::vector<LayerPlace> layers;
  int64_t size_bytes = 0;
  int64_t gradient_bytes = 0;  // at most: gradients of the blocks trainable now, as they are transferred
  int64_t sum_bytes = 0;       // their sums on the device: 16-bit gradients are summed in fp32
  int64_t rounded_bytes = 0;   // of sums, rounded before the transfer; sums of tied blocks are not rounded
};
// `apart`: blocks that are not in the slot.
StageLayout lay_out_stage(const ModelState& model, int first_layer, int last_layer, const std::set<size_t>& apart = {});

// Of the blocks that `layer` is the first to have; see JoinedGradients.
JoinedGradients joined_gradients(const ModelState& model, int layer);

}  // namespace roundpipe::runtime
