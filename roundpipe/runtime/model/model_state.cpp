#include <roundpipe/runtime/model/model_state.h>

#include <algorithm>
#include <map>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/memory_rules.h>
#include <roundpipe/memory/mapped_file.h>
#include <roundpipe/memory/overlap.h>

namespace roundpipe::runtime {

using memory::NamedTensor;

namespace {

// Kinds of parameters of a layer, each with a block of its own: only trainable ones have gradients and are updated, and
// only mapped ones take no memory of ours.
enum class Kind { kTrainable, kFrozen, kMapped };

Kind kind_of(const at::Tensor& parameter) {
  if (parameter.requires_grad()) return Kind::kTrainable;
  return memory::is_mapped(parameter) ? Kind::kMapped : Kind::kFrozen;
}

}  // namespace

BlockState::BlockState(std::vector<NamedTensor> parameters, std::vector<int> block_layers, bool pinned)
    : block(std::make_unique<memory::ParameterBlock>(std::move(parameters), pinned)),
      layers(std::move(block_layers)),
      gradient_layout(block->layout()),
      gradient_buffers(block->buffers()) {
  make_sum_buffers();
}

void BlockState::make_sum_buffers() {
  sum_layout = gradient_layout.widened();
  const bool same = sum_layout.same_dtypes(gradient_layout);
  sum_buffers =
      same ? gradient_buffers : std::make_shared<memory::BufferPool>(sum_layout.size_bytes, block->buffers()->pinned());
  if (tied()) sum_buffers->keep(layers.size());
}

void BlockState::keep_gradients_in_fp32() {
  gradient_layout = block->layout().widened();
  if (gradient_layout.size_bytes == block->layout().size_bytes) return;
  gradient_buffers = std::make_shared<memory::BufferPool>(gradient_layout.size_bytes, block->buffers()->pinned());
  make_sum_buffers();
}

bool BlockState::trainable() const {
  const auto& parameters = block->parameters();
  return std::any_of(parameters.begin(), parameters.end(), [](const auto& p) { return p.tensor.requires_grad(); });
}

int64_t BlockState::sum_bytes(int64_t parts) const {
  if (parts < 2 || !trainable()) return 0;
  return sum_layout.size_bytes * partial_sums(parts, sum_buffers != gradient_buffers);
}

JoinedGradients BlockState::joined() const {
  if (!tied() || !trainable()) return {};
  const auto sharers = static_cast<int64_t>(layers.size());
  const bool wider = !sum_layout.same_dtypes(gradient_layout);
  return {layers.back(), sharers * sum_layout.size_bytes - gradient_layout.size_bytes,
          wider ? gradient_layout.size_bytes : 0};
}

JoinedGradients joined_gradients(const ModelState& model, int layer) {
  JoinedGradients all;
  for (const size_t block : model.layers[static_cast<size_t>(layer)]->blocks) {
    const JoinedGradients joined = model.blocks[block].joined();
    if (joined.last_layer == 0 || model.blocks[block].layers.front() != layer) continue;
    all.last_layer = std::max(all.last_layer, joined.last_layer);
    all.saved += joined.saved;
    all.rounded += joined.rounded;
  }
  return all;
}

ModelState::ModelState(std::string model_name, std::vector<std::unique_ptr<Layer>> model_layers, bool pinned,
                       const ModelState* in_place_of)
    : name(std::move(model_name)) {
  if (model_layers.empty()) throw std::invalid_argument("[RoundPipe] the model has no layers; give it at least one");
  std::map<const void*, std::vector<int>> users;  // parameter -> layers, ascending
  std::vector<std::vector<NamedTensor>> parameters;
  ParameterClaim::Named claimed;
  for (size_t l = 0; l < model_layers.size(); ++l) {
    parameters.push_back(model_layers[l]->parameters());
    for (const NamedTensor& parameter : parameters.back()) {
      claimed.push_back({concat(model_layers[l]->name(), ".", parameter.name), parameter.tensor});
      std::vector<int>& layers_of = users[parameter.tensor.unsafeGetTensorImpl()];
      if (layers_of.empty() || layers_of.back() != static_cast<int>(l)) layers_of.push_back(static_cast<int>(l));
    }
  }
  ParameterClaim::require_free(ParameterClaim::To::kValues, name, claimed,
                               in_place_of != nullptr ? in_place_of->claim.get() : nullptr);
  memory::refuse_overlap(claimed);
  std::map<const void*, LayerState::ParameterPlace> places;
  const auto add_block = [&](std::vector<NamedTensor> members, std::vector<int> block_layers) {
    for (size_t i = 0; i < members.size(); ++i) places[members[i].tensor.unsafeGetTensorImpl()] = {blocks.size(), i};
    blocks.emplace_back(std::move(members), std::move(block_layers), pinned);
  };
  for (size_t l = 0; l < model_layers.size(); ++l) {
    auto state = std::make_unique<LayerState>();
    for (const Kind kind : {Kind::kTrainable, Kind::kFrozen, Kind::kMapped}) {
      std::vector<NamedTensor> own;
      for (const NamedTensor& parameter : parameters[l]) {
        const void* key = parameter.tensor.unsafeGetTensorImpl();
        const bool seen = places.contains(key) || std::any_of(own.begin(), own.end(), [&](const NamedTensor& other) {
                            return other.tensor.unsafeGetTensorImpl() == key;
                          });
        if (!seen && users[key].size() == 1 && kind_of(parameter.tensor) == kind) own.push_back(parameter);
      }
      if (own.empty()) continue;
      state->blocks.push_back(blocks.size());
      add_block(std::move(own), {static_cast<int>(l)});
    }
    for (const NamedTensor& parameter : parameters[l]) {
      const void* key = parameter.tensor.unsafeGetTensorImpl();
      if (!places.contains(key)) add_block({parameter}, users[key]);
      const LayerState::ParameterPlace place = places[key];
      state->parameters.push_back(place);
      if (std::find(state->blocks.begin(), state->blocks.end(), place.block) == state->blocks.end()) {
        state->blocks.push_back(place.block);
      }
    }
    state->buffers = model_layers[l]->buffers();
    for (const NamedTensor& buffer : state->buffers) {
      if (!buffer.tensor.device().is_cpu() || buffer.tensor.layout() != c10::kStrided) {
        throw std::invalid_argument(concat("[RoundPipe] buffer '", buffer.name, "' is a ", buffer.tensor.toString(),
                                           " on ", buffer.tensor.device().str(),
                                           ", expected a dense tensor on the CPU; move the model there first; one "
                                           "without values (on meta) is made there, in Python by "
                                           "to_empty(device='cpu')"));
      }
      state->buffer_layout.add(buffer.tensor, buffer.tensor.scalar_type());
    }
    state->layer = std::move(model_layers[l]);
    layers.push_back(std::move(state));
  }
  gradients.resize(blocks.size());
  claim = std::make_unique<ParameterClaim>(ParameterClaim::To::kValues, name, std::move(claimed), [this] {
    for (const BlockState& block : blocks) block.block->let_parameters_go();
  });
}

std::vector<std::vector<char>> ModelState::trainable() const {
  std::vector<std::vector<char>> flags;
  for (const auto& layer : layers) {
    std::vector<char>& layer_flags = flags.emplace_back();
    for (const LayerState::ParameterPlace& place : layer->parameters) {
      layer_flags.push_back(blocks[place.block].block->parameters()[place.index].tensor.requires_grad());
    }
  }
  return flags;
}

std::shared_ptr<const void> ModelState::hold() const {
  for (const auto& layer : layers) {
    if (std::shared_ptr<const void> held = layer->layer->hold()) return held;
  }
  return nullptr;
}

std::vector<LayerHabitsPtr> ModelState::habits_of_now() {
  const std::shared_ptr<const void> held = hold();
  std::vector<LayerHabitsPtr> found;
  for (const auto& layer : layers) {
    LayerHabitsPtr& habits = layer->habits[layer->layer->mode_key()];
    if (!habits) habits = std::make_shared<LayerHabits>(layer->parameters.size());
    found.push_back(habits);
  }
  return found;
}

void ModelState::notify(Notice kind, std::string notice) {
  const MutexLock lock(notice_mutex_);
  if (!notice.empty() && noticed_.insert(kind).second) notices_.push_back(std::move(notice));
}

void ModelState::torn(const std::vector<int>& torn_layers) {
  const MutexLock lock(notice_mutex_);
  torn_.insert(torn_layers.begin(), torn_layers.end());
}

std::vector<int> ModelState::take_torn_layers() {
  const MutexLock lock(notice_mutex_);
  std::vector<int> taken(torn_.begin(), torn_.end());
  torn_.clear();
  return taken;
}

std::vector<std::string> ModelState::take_notices() {
  const MutexLock lock(notice_mutex_);
  return std::exchange(notices_, {});
}

int64_t ModelState::host_bytes() const {
  require_own_process();
  std::set<const memory::BufferPool*> pools;
  for (const BlockState& block : blocks)
    pools.insert({block.block->buffers().get(), block.gradient_buffers.get(), block.sum_buffers.get()});
  int64_t bytes = 0;
  for (const memory::BufferPool* const pool : pools) bytes += pool->host_bytes();
  return bytes;
}

void ModelState::bound_gradients(bool is_bounded) {
  gradient_room = nullptr;
  if (!is_bounded) return;
  std::vector<int64_t> sizes;
  std::map<std::pair<int64_t, bool>, std::vector<BlockState*>> alike;
  for (BlockState& block : blocks) {
    // Gradients wider than the weights have memory of their own, as there are sums of several calls in it.
    if (!block.trainable() || block.gradient_buffers != block.block->buffers()) continue;
    sizes.push_back(block.gradient_layout.size_bytes);
    alike[{sizes.back(), block.block->buffers()->pinned()}].push_back(&block);
  }
  gradient_room = memory::GradientRoom::make(memory::gradient_room_bytes(sizes));
  for (const auto& [kind, own] : alike) {
    const std::shared_ptr<memory::BufferPool> pool = own.front()->block->buffers();
    if (kind.first > 0) pool->keep(static_cast<size_t>(gradient_room->limit_bytes() / kind.first));
    for (BlockState* const block : own) {
      if (block->sum_buffers == block->gradient_buffers) block->sum_buffers = pool;
      block->block->use_pool(pool);
      block->gradient_buffers = pool;
    }
  }
}

StageLayout lay_out_stage(const ModelState& model, int first_layer, int last_layer, const std::set<size_t>& apart) {
  StageLayout stage;
  for (int l = first_layer; l < last_layer; ++l) {
    const LayerState& layer = *model.layers[static_cast<size_t>(l)];
    StageLayout::LayerPlace place;
    for (const size_t block : layer.blocks) {
      if (apart.contains(block)) {
        place.blocks_at.push_back(-1);
        continue;
      }
      place.blocks_at.push_back(stage.size_bytes);
      stage.size_bytes =
          align_up(stage.size_bytes + model.blocks[block].block->layout().size_bytes, kBlockAlignment_bytes);
      if (!model.blocks[block].trainable()) continue;
      const memory::BlockLayout& narrow = model.blocks[block].gradient_layout;
      const memory::BlockLayout wide = narrow.widened();
      const GradientBytes gradients =
          gradient_bytes(narrow.size_bytes, wide.size_bytes, !wide.same_dtypes(narrow), model.blocks[block].tied());
      stage.gradient_bytes += gradients.sent;
      stage.sum_bytes += gradients.sums;
      stage.rounded_bytes += gradients.rounded;
    }
    place.buffers_at = stage.size_bytes;
    stage.size_bytes = align_up(stage.size_bytes + layer.buffer_layout.size_bytes, kBlockAlignment_bytes);
    stage.layers.push_back(std::move(place));
  }
  return stage;
}

}  // namespace roundpipe::runtime
