#include <roundpipe/api/host_weights.h>

#include <algorithm>
#include <stdexcept>

#include <roundpipe/api/grad_scaler.h>
#include <roundpipe/core/error.h>

namespace roundpipe {

using runtime::BlockState;
using runtime::ModelOptimizer;

HostWeights::HostWeights(std::shared_ptr<runtime::Pipeline> pipeline, NamedParameters named)
    : pipeline_(std::move(pipeline)), named_(std::move(named)) {
  // Until there is a fused optimizer, a backward leaves its gradients in `.grad`, as it does without a pipeline.
  pipeline_->gradients().set_shows_at_once(true);
}

void HostWeights::synchronize() {
  pipeline_->drain();
  if (optimizer_) optimizer_->finish();
  hides_weights_ = false;
  pipeline_->wait_buffers();
  pipeline_->expose();
  GradScaler::synchronize_all();
}

const NamedParameters& HostWeights::named_parameters() {
  if (hides_weights_) {
    pipeline_->weights().show();
    hides_weights_ = false;
  }
  return named_;
}

void HostWeights::zero_grad() { pipeline_->gradients().drop(); }

std::shared_ptr<ModelOptimizer> HostWeights::bind(const GroupOf& group_of, const std::function<void()>& accepted,
                                                  optim::Algorithm algorithm, optim::MomentFormat moments,
                                                  bool gradients_in_fp32) {
  std::vector<at::Tensor> trained;
  std::vector<int> groups;
  for (const auto& [name, parameter] : named_) {
    const auto same = [&parameter = parameter](const at::Tensor& known) { return known.is_same(parameter); };
    if (!parameter.requires_grad() || std::ranges::any_of(trained, same)) continue;
    trained.push_back(parameter);
    groups.push_back(group_of(name, parameter));
  }
  if (trained.empty()) {
    throw std::invalid_argument(
        "[optimizer] the model has no trainable parameter; set requires_grad of what is to be trained");
  }
  accepted();
  synchronize();
  std::vector<std::vector<int>> blocks;
  for (const BlockState& block : pipeline_->model().blocks) {
    blocks.emplace_back();
    for (const memory::NamedTensor& parameter : block.block->parameters()) {
      const auto same = [&](const at::Tensor& known) { return known.is_same(parameter.tensor); };
      const auto found = std::ranges::find_if(trained, same);
      blocks.back().push_back(found == trained.end() ? -1 : groups[static_cast<size_t>(found - trained.begin())]);
    }
  }
  if (gradients_in_fp32) pipeline_->keep_gradients_in_fp32();
  auto made = std::make_shared<ModelOptimizer>(std::vector{pipeline_},
                                               std::vector<std::vector<std::vector<int>>>{blocks}, algorithm, moments);
  pipeline_->gradients().set_shows_at_once(false);
  trained_ = std::move(trained);
  optimizer_ = made;
  return made;
}

void HostWeights::check_trainable() const {
  if (!optimizer_) return;
  for (const auto& [name, parameter] : named_) {
    const auto same = [&parameter = parameter](const at::Tensor& known) { return known.is_same(parameter); };
    if (!parameter.requires_grad() || std::ranges::any_of(trained_, same)) continue;
    throw std::invalid_argument(concat("[model] parameter '", name,
                                       "' was frozen when the optimizer was made and requires grad now, so nothing "
                                       "would update it; set requires_grad first, then make the optimizer"));
  }
}

std::shared_ptr<runtime::StepRun> HostWeights::start_step(ModelOptimizer& optimizer,
                                                          std::vector<optim::Hyperparameters> groups,
                                                          const runtime::StepOptions& options) {
  if (optimizer_.get() != &optimizer) {
    throw std::invalid_argument(
        "[step] the optimizer was not made for this model, or another one was made since; make one with "
        "Optimizer(model, ...)");
  }
  check_trainable();
  pipeline_->planner().set_asynchronous(options.asynchronous);
  pipeline_->raise_pending();
  std::shared_ptr<runtime::StepRun> run = optimizer.step(std::move(groups), options);
  hides_weights_ = true;
  return run;
}

void HostWeights::require_plain(const char* where) const {
  if (!optimizer_) return;
  throw std::invalid_argument(concat("[", where,
                                     "] an Optimizer was made for this model and updates it in place, "
                                     "expected steps by it: model.step(optimizer)"));
}

}  // namespace roundpipe
