#include <roundpipe/runtime/model/weight_publisher.h>

#include <algorithm>
#include <utility>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>

namespace roundpipe::runtime {

WeightUpdate::WeightUpdate(std::shared_ptr<ModelState> model, std::vector<std::vector<at::Tensor>> parameters,
                           Blocks blocks)
    : model_(std::move(model)), parameters_(std::move(parameters)), blocks_(std::move(blocks)) {}

WeightUpdate::~WeightUpdate() {
  for (const auto& [index, update] : blocks_) {
    if (update.after->published->complete()) continue;
    update.after->published->fail(
        std::make_exception_ptr(Error("[step] an update of the weights was dropped before it was made, so the new "
                                      "weights do not exist; report this")));
  }
}

void WeightUpdate::make() {
  for (auto& [index, update] : blocks_) {
    std::vector<at::Tensor> values;
    for (const at::Tensor& parameter : parameters_[index]) values.push_back(parameter.detach());
    model_->blocks[index].block->copy_in(update, values);
  }
  blocks_.clear();
}

void WeightPublisher::set_optimizer_parameters(std::vector<std::vector<at::Tensor>> parameters) {
  optimizer_parameters_ = std::move(parameters);
}

bool WeightPublisher::changes(size_t block) const {
  const std::vector<memory::NamedTensor>& parameters = model_->blocks[block].block->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!optimizer_parameters_[block][i].is_same(parameters[i].tensor)) return true;
  }
  return false;
}

std::unique_ptr<WeightUpdate> WeightPublisher::begin_update(bool in_place) {
  using Reads = memory::ParameterBlock::Reads;
  WeightUpdate::Blocks begun;
  for (size_t b = 0; b < model_->blocks.size(); ++b) {
    if (!changes(b)) continue;
    begun.emplace_back(b, model_->blocks[b].block->begin_update(in_place ? Reads::kAfter : Reads::kAfterAndGraphs));
  }
  return std::make_unique<WeightUpdate>(model_, optimizer_parameters_, std::move(begun));
}

std::vector<std::vector<at::Tensor>> WeightPublisher::read_by_calls() const {
  std::vector<std::vector<at::Tensor>> weights;
  for (const BlockState& block : model_->blocks) {
    const memory::WeightVersionPtr& version = block.block->current();
    device::wait_interruptible(*version->published);
    auto& of_block = weights.emplace_back(version->parts);
    for (size_t i = of_block.size(); i < block.block->parameters().size(); ++i) {
      of_block.push_back(block.block->layout().view(version->flat, i));
    }
  }
  return weights;
}

void WeightPublisher::adopt_replaced() {
  std::vector<memory::ParameterBlock*> blocks;
  for (const BlockState& block : model_->blocks) blocks.push_back(block.block.get());
  memory::ParameterBlock::adopt_replaced(blocks);
}

void WeightPublisher::show_complete() {
  adopt_replaced();
  for (const BlockState& block : model_->blocks) {
    if (!block.block->shows_weights() && block.block->current()->published->complete()) block.block->repoint();
  }
}

void WeightPublisher::show() {
  const auto shown = [](const BlockState& block) {
    const memory::ParameterBlock& parameters = *block.block;
    const bool calls_read_newest = parameters.current() == parameters.newest();
    return parameters.shows_weights() && parameters.shows_newest() == calls_read_newest;
  };
  if (std::ranges::all_of(model_->blocks, shown)) return;
  require_own_process();
  adopt_replaced();
  for (const BlockState& block : model_->blocks) {
    if (shown(block)) continue;
    // Not there: a layer that reads a parameter would wait for a step that may wait for it.
    if (is_engine_thread() && !block.block->current()->published->complete()) continue;
    device::wait_interruptible(*block.block->current()->published);
    block.block->repoint();
  }
}

bool WeightPublisher::show_newest() {
  const auto shown = [](const BlockState& block) { return block.block->shows_newest(); };
  if (std::ranges::all_of(model_->blocks, shown)) return true;
  require_own_process();
  if (is_engine_thread()) return false;
  adopt_replaced();
  for (const BlockState& block : model_->blocks) {
    device::wait_interruptible(*block.block->newest()->published);
    block.block->show_newest();
  }
  return true;
}

}  // namespace roundpipe::runtime
