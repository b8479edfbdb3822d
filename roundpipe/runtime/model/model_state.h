#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <roundpipe/memory/gradient_block.h>
#include <roundpipe/memory/parameter_block.h>
#include <roundpipe/runtime/model/layer.h>
#include <roundpipe/runtime/model/random.h>
#include <roundpipe/runtime/model/shells.h>

namespace roundpipe::runtime {

// Something that is found out by watching a layer run.
enum class Learned : int { kUnknown, kNo, kYes };

// In how little memory a microbatch runs. Both leave the same bits.
enum class Frugality : int {
  kStage,  // the graph of a whole stage at once
  kLayer,  // the graph of one layer at a time
};

// What a layer does in one mode (of training or evaluation flags), found out while it runs. Each call keeps those of
// the mode it was made in: another mode may have begun while it runs. Thread safety: any thread.
struct LayerHabits {
  SharedDraws shared_draws;
  std::atomic<Learned> writes_inputs{Learned::kUnknown};
  std::atomic<Learned> writes_buffers{Learned::kUnknown};
};
using LayerHabitsPtr = std::shared_ptr<LayerHabits>;

// One layer of a model and what the engine knows of it.
struct LayerState {
  std::unique_ptr<Layer> layer;
  std::vector<size_t>
      blocks;  // indices into ModelState::blocks: its own first, trainable then frozen then mapped, then shared ones

  // Where parameter i of the layer lies: blocks[...] and the index in that block.
  struct ParameterPlace {
    size_t block;
    size_t index;
  };
  std::vector<ParameterPlace> parameters;

  std::vector<memory::NamedTensor> buffers;
  memory::BlockLayout buffer_layout;

  std::map<uint64_t, LayerHabitsPtr> habits;  // by Layer::mode_key(); caller's thread only
  // How it has to run for want of memory.
  std::atomic<Frugality> frugality{Frugality::kStage};
  // What the last forward and the last backward of one microbatch took the device; 0 = unknown.
  std::atomic<double> forward_ms{0};
  std::atomic<double> backward_ms{0};
  // When the buffers hold what the last submitted forward makes of them; caller's thread only.
  device::EventPtr buffers_current;
};

// A parameter block and who uses it.
struct BlockState {
  BlockState(std::vector<memory::NamedTensor> parameters, std::vector<int> layers, bool pinned);

  std::unique_ptr<memory::ParameterBlock> block;
  std::vector<int> layers;  // ascending; more than one when tied
  // How gradients lie on the host, and where their memory comes from: as the weights do, unless kept in fp32.
  memory::BlockLayout gradient_layout;
  std::shared_ptr<memory::BufferPool> gradient_buffers;
  // Of a tied block: how each layer's own sum lies, and where its memory comes from; the gradients' where they have its
  // types.
  memory::BlockLayout sum_layout;
  std::shared_ptr<memory::BufferPool> sum_buffers;
  // What the fp32 master of each parameter has beyond its weights, once a fused optimizer trains it.
  std::vector<at::Tensor> master_rest;

  bool tied() const { return layers.size() > 1; }
  // Which of the layers that share the block `layer` is. REQUIRES: it is one of them.
  size_t sharer(int layer) const {
    return static_cast<size_t>(std::find(layers.begin(), layers.end(), layer) - layers.begin());
  }
  // Whether any parameter is, by the user's flags of now.
  bool trainable() const;
  // What the layers' sums take on the host beside gradients; 0 for a block that is not tied.
  int64_t sum_bytes() const;
  // From now on 16-bit weights have fp32 gradients on the host. REQUIRES: no gradient has been made yet.
  void keep_gradients_in_fp32();

 private:
  void make_sum_buffers();
};

// The host side of a model: layers, parameters, and the gradients that the calls since the last step have summed.
// Ownership: owns the layers, which keep the user's modules alive.
// Thread safety: built and changed on the caller's thread; workers read.
struct ModelState {
  ModelState(std::string name, std::vector<std::unique_ptr<Layer>> layers, bool pinned);

  std::string name;
  std::vector<std::unique_ptr<LayerState>> layers;
  std::vector<BlockState> blocks;
  SharedDraws loss_shared_draws;  // of the loss functions this model is called with
  Shells shells;                  // on the workers of the pool that its calls run on
  // What a device needs for a job beside weights, at most; 0 = not known.
  std::atomic<int64_t> work_bytes{0};
  // One for each block; null = nothing summed. Caller's thread only.
  std::vector<memory::GradientBlockPtr> gradients;

  int layer_count() const { return static_cast<int>(layers.size()); }
  // Trainable now, by the user's flags: [layer][parameter].
  std::vector<std::vector<char>> trainable() const;
  // Notes, once for a model, what the user is to be told. Any thread.
  void ran_out_of_memory(std::string notice);
  // What has been noted since the last call; empty = nothing.
  std::string take_notice();
  // Of the first layer that holds something (see Layer::hold), to be kept while all of them are asked.
  std::shared_ptr<const void> hold() const;
  // What each layer does in the mode it is in now; reads the layers' mode keys. Caller's thread.
  std::vector<LayerHabitsPtr> habits_of_now();
  // Throws Error in a process that is left behind.
  int64_t host_bytes() const;

 private:
  std::mutex notice_mutex_;
  // Protected by notice_mutex_.
  std::string notice_;
  bool noticed_ = false;
};

// Where the weights and buffers of consecutive layers lie in one slot.
struct StageLayout {
  struct LayerPlace {
    std::vector<int64_t> blocks_at;  // byte offset of each of LayerState::blocks
    int64_t buffers_at = 0;
  };
  std::vector<LayerPlace> layers;
  int64_t size_bytes = 0;
  int64_t gradient_bytes = 0;  // at most, of the blocks that are trainable now, as they travel
  int64_t sum_bytes = 0;       // of their sums on the device: 16-bit ones are summed in fp32
  int64_t rounded_bytes = 0;   // of those that are rounded before they travel; sums of tied blocks are not
};
StageLayout lay_out_stage(const ModelState& model, int first_layer, int last_layer);

}  // namespace roundpipe::runtime
