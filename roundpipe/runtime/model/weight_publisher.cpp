#include <roundpipe/runtime/model/weight_publisher.h>

#include <utility>

#include <roundpipe/core/engine_life.h>

namespace roundpipe::runtime {

void WeightPublisher::set_optimizer_parameters(std::vector<std::vector<at::Tensor>> parameters) {
  optimizer_parameters_ = std::move(parameters);
}

bool WeightPublisher::changes(size_t block) const {
  const std::vector<memory::NamedTensor>& parameters = model_.blocks[block].block->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!optimizer_parameters_[block][i].is_same(parameters[i].tensor)) return true;
  }
  return false;
}

void WeightPublisher::begin(bool in_place) {
  using Reads = memory::ParameterBlock::Reads;
  Updates updates;
  for (size_t b = 0; b < model_.blocks.size(); ++b) {
    if (!changes(b)) continue;
    updates.emplace_back(b, model_.blocks[b].block->begin_update(in_place ? Reads::kAfter : Reads::kAfterAndGraphs));
  }
  const MutexLock lock(mutex_);
  begun_.push_back(std::move(updates));
}

void WeightPublisher::finish() {
  Updates updates;
  {
    const MutexLock lock(mutex_);
    updates = std::move(begun_.front());
    begun_.pop_front();
  }
  for (auto& [index, update] : updates) {
    std::vector<at::Tensor> values;
    for (const at::Tensor& parameter : optimizer_parameters_[index]) values.push_back(parameter.detach());
    model_.blocks[index].block->copy_in(std::move(update), values);
  }
}

void WeightPublisher::show_complete() {
  for (const BlockState& block : model_.blocks) {
    if (!block.block->shows_weights() && block.block->current()->published->complete()) block.block->repoint();
  }
}

void WeightPublisher::show() {
  require_own_process();
  for (const BlockState& block : model_.blocks) {
    if (!block.block->shows_weights()) device::wait_interruptible(*block.block->current()->published);
  }
  show_complete();
}

}  // namespace roundpipe::runtime
