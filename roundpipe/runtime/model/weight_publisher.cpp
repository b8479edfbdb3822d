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
  for (size_t b = 0; b < model_.blocks.size(); ++b) {
    if (changes(b)) model_.blocks[b].block->begin_publish(in_place);
  }
}

void WeightPublisher::finish() {
  for (size_t b = 0; b < model_.blocks.size(); ++b) {
    if (!changes(b)) continue;
    std::vector<at::Tensor> values;
    for (const at::Tensor& parameter : optimizer_parameters_[b]) values.push_back(parameter.detach());
    model_.blocks[b].block->finish_publish(values);
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
