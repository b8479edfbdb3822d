#include <roundpipe/runtime/model_optimizer.h>

#include <atomic>

#include <roundpipe/core/error.h>

namespace roundpipe::runtime {

using optim::BlockOptimizer;
using optim::Hyperparameters;

ModelOptimizer::ModelOptimizer(std::vector<std::shared_ptr<Pipeline>> pipelines,
                               const std::vector<std::vector<std::vector<int>>>& groups, optim::Algorithm algorithm,
                               optim::MomentFormat format)
    : pipelines_(std::move(pipelines)), blocks_(std::make_shared<Blocks>()), seen_(pipelines_.size()) {
  for (size_t p = 0; p < pipelines_.size(); ++p) {
    blocks_->models.push_back(pipelines_[p]->shared_model());
    auto& optimizers = blocks_->optimizers.emplace_back();
    for (size_t b = 0; b < groups[p].size(); ++b) {
      BlockState& state = blocks_->models[p]->blocks[b];
      optimizers.push_back(
          std::make_unique<BlockOptimizer>(*state.block, groups[p][b], state.master_rest, algorithm, format));
      seen_[p].emplace_back(state.block->parameters().size());
    }
  }
  accept_weights();
}

void ModelOptimizer::accept_weights() {
  for (size_t p = 0; p < pipelines_.size(); ++p) {
    for (size_t b = 0; b < seen_[p].size(); ++b) written(p, b);
  }
}

std::vector<size_t> ModelOptimizer::written(size_t pipeline, size_t block) {
  std::vector<size_t> indices;
  const auto& parameters = blocks_->models[pipeline]->blocks[block].block->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto version = static_cast<uint32_t>(parameters[i].tensor._version());
    if (std::exchange(seen_[pipeline][block][i], version) != version) indices.push_back(i);
  }
  return indices;
}

void ModelOptimizer::reap(size_t at_most) {
  while (runs_.size() > at_most || (!runs_.empty() && runs_.front()->finished()->complete())) {
    const std::shared_ptr<StepRun> run = runs_.front();
    if (!run->finished()->complete()) {
      // Its error is for the caller, an interrupt leaves everything as it is.
      try {
        device::wait_interruptible(*run->finished());
      } catch (...) {
        if (!run->finished()->complete()) throw;
      }
    }
    runs_.pop_front();
    if (const std::exception_ptr error = run->finished()->error()) std::rethrow_exception(error);
  }
}

std::shared_ptr<StepRun> ModelOptimizer::step(std::vector<Hyperparameters> groups, const StepOptions& options) {
  static std::atomic<uint64_t> next_number{1};
  constexpr size_t kUnderWay = 2;
  reap(kUnderWay - 1);
  for (const auto& pipeline : pipelines_) pipeline->raise_pending();
  std::vector<std::vector<std::vector<size_t>>> changed(pipelines_.size());
  for (size_t p = 0; p < pipelines_.size(); ++p) {
    for (size_t b = 0; b < seen_[p].size(); ++b) {
      changed[p].push_back(written(p, b));
      const memory::ParameterBlock& block = *blocks_->models[p]->blocks[b].block;
      if (changed[p][b].empty() || block.settled()) continue;
      throw std::invalid_argument(concat("[step] parameter '", block.parameters()[changed[p][b].front()].name,
                                         "' was written while a step was under way, whose weights replace it; call "
                                         "model.synchronize() before you write, and write again"));
    }
  }
  std::vector<BlockStep> steps;
  size_t first_layer = 0;
  for (size_t p = 0; p < pipelines_.size(); ++p) {
    ModelState& model = *blocks_->models[p];
    const std::vector<memory::GradientBlockPtr> gradients = pipelines_[p]->take_gradients();
    pipelines_[p]->commit_calls();
    for (size_t b = 0; b < model.blocks.size(); ++b) {
      BlockState& state = model.blocks[b];
      BlockOptimizer& optimizer = *blocks_->optimizers[p][b];
      if (!optimizer.trains_any()) continue;
      if (!gradients[b]) {
        for (const size_t i : changed[p][b])
          optimizer.restart_master(i, state.block->layout().view(state.block->current()->flat, i));
        if (state.block->settle()) state.block->repoint();
        continue;
      }
      const auto layer = static_cast<size_t>(state.layers.front());
      const memory::ParameterBlock::Update versions = state.block->begin_update(options.asynchronous);
      state.block->repoint();
      steps.push_back({&state, &optimizer, first_layer + layer, gradients[b], versions.before, versions.after,
                       std::move(changed[p][b]), model.layers[layer]->layer->emulated_update_ms()});
    }
    first_layer += model.layers.size();
  }
  const auto run = std::make_shared<StepRun>(next_number++, std::move(steps), std::move(groups), options, blocks_);
  runs_.push_back(run);
  run->start();
  return run;
}

void ModelOptimizer::finish() {
  reap(0);
  for (const auto& model : blocks_->models) {
    for (const BlockState& state : model->blocks) {
      if (state.block->settle()) state.block->repoint();
    }
  }
}

ModelOptimizer::HostBytes ModelOptimizer::host_bytes(const std::vector<Hyperparameters>& groups) const {
  HostBytes bytes;
  for (size_t p = 0; p < blocks_->models.size(); ++p) {
    bytes.weights_and_gradients += blocks_->models[p]->host_bytes();
    for (size_t b = 0; b < blocks_->optimizers[p].size(); ++b) {
      const BlockOptimizer& optimizer = *blocks_->optimizers[p][b];
      const auto& parameters = blocks_->models[p]->blocks[b].block->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (optimizer.group(i) >= 0) bytes.parameters += parameters[i].tensor.numel();
      }
      bytes.rests += optimizer.rest_bytes();
      bytes.moments += optimizer.moment_bytes(groups);
    }
  }
  return bytes;
}

}  // namespace roundpipe::runtime
