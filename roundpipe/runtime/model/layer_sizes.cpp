#include <roundpipe/runtime/model/layer_sizes.h>

#include <roundpipe/core/bytes.h>

namespace roundpipe::runtime {

std::vector<simulate::LayerBytes> layer_sizes(const ModelState& model) {
  std::vector<simulate::LayerBytes> layers;
  for (int l = 0; l < model.layer_count(); ++l) {
    const StageLayout layout = lay_out_stage(model, l, l + 1);
    simulate::LayerBytes& layer = layers.emplace_back();
    layer.weights = layout.size_bytes;
    layer.gradients = layout.gradient_bytes;
    layer.sums = layout.sum_bytes;
    layer.rounded = layout.rounded_bytes;
    layer.joined = joined_gradients(model, l);
    for (const size_t block : model.layers[static_cast<size_t>(l)]->blocks) {
      const BlockState& state = model.blocks[block];
      const int64_t bytes = align_up(state.block->layout().size_bytes, kBlockAlignment_bytes);
      if (bytes > 0 && !state.trainable()) layer.frozen.push_back({block, bytes});
    }
  }
  return layers;
}

}  // namespace roundpipe::runtime
