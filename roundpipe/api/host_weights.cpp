#include <roundpipe/api/host_weights.h>

#include <stdexcept>
#include <unordered_map>

#include <roundpipe/core/error.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/runtime/model_optimizer.h>
#include <roundpipe/training/copy_steps.h>
#include <roundpipe/training/model_core.h>

namespace roundpipe {

using runtime::BlockState;
using runtime::ModelOptimizer;

HostWeights::HostWeights(std::shared_ptr<ModelCore> core, NamedParameters named, NamedParameters buffers)
    : core_(std::move(core)), named_(std::move(named)), buffers_(std::move(buffers)) {
  // Until there is a fused optimizer, a backward leaves its gradients in `.grad`, as it does without a pipeline.
  pipeline().gradients().set_shows_at_once(true);
}

HostWeights::~HostWeights() { leave_weights(); }

HostWeights& HostWeights::operator=(HostWeights&& other) noexcept {
  if (this == &other) return *this;
  leave_weights();
  core_ = std::move(other.core_);
  named_ = std::move(other.named_);
  buffers_ = std::move(other.buffers_);
  optimizer_ = std::move(other.optimizer_);
  trained_ = std::move(other.trained_);
  copies_ = std::move(other.copies_);
  optimizer_parameters_ = std::move(other.optimizer_parameters_);
  copies_dtype_ = other.copies_dtype_;
  is_behind_ = other.is_behind_;
  return *this;
}

void HostWeights::leave_weights() noexcept {
  if (!core_) return;
  try {
    if (is_behind_) synchronize();
  } catch (...) {
    // Work that nobody waited for has failed, or the engine has ended; then the modules keep what they have.
  }
  pipeline().release();
}

ModelCore& HostWeights::core() const {
  require_not_moved_from(core_ != nullptr, "model");
  return *core_;
}

const std::shared_ptr<runtime::Pipeline>& HostWeights::shared_pipeline() const { return core().pipeline(); }

runtime::Pipeline& HostWeights::pipeline() const { return *shared_pipeline(); }

const std::shared_ptr<ModelOptimizer>& HostWeights::fused_optimizer() const {
  shared_pipeline();
  return optimizer_;
}

const NamedParameters& HostWeights::parameter_names() const {
  shared_pipeline();
  return named_;
}

const NamedParameters& HostWeights::buffer_names() const {
  shared_pipeline();
  return buffers_;
}

void HostWeights::synchronize() {
  if (copies_) copies_->synchronize();
  pipeline().drain();
  if (optimizer_) optimizer_->finish();
  is_behind_ = false;
  pipeline().wait_buffers();
  pipeline().expose();
  const auto& scales = pipeline().model().loss_scales;
  for (const auto& scale : scales->all()) scale->settle(scales);
}

const NamedParameters& HostWeights::named_parameters() {
  if (copies_)
    copies_->show_weights();
  else
    pipeline().weights().show_newest();
  return named_;
}

void HostWeights::zero_grad() {
  if (copies_) {
    synchronize();
    copies_->clear_gradients(/*set_to_none=*/true);
  }
  pipeline().gradients().drop();
}

const NamedParameters& HostWeights::optimizer_parameters(std::optional<c10::ScalarType> dtype) {
  if (copies_) {
    if (dtype && dtype != copies_dtype_) {
      throw std::invalid_argument(concat("[optimizer_parameters] they were made with ",
                                         copies_dtype_ ? c10::toString(*copies_dtype_) : "each parameter's own dtype",
                                         ", and ", *dtype, " is asked for now, expected the same"));
    }
    return optimizer_parameters_;
  }
  if (optimizer_) {
    throw std::invalid_argument(
        "[optimizer_parameters] an Optimizer was made for this model and updates it in place, expected a model that is "
        "stepped in one way only; use model.step(optimizer), or make the model again");
  }
  synchronize();
  std::vector<at::Tensor> sources, copies;
  NamedParameters named;
  std::unordered_set<const c10::TensorImpl*> trained;
  for (const auto& [name, parameter] : named_) {
    if (!parameter.requires_grad() || !trained.insert(parameter.unsafeGetTensorImpl()).second) continue;
    const c10::ScalarType own = parameter.scalar_type();
    at::Tensor copy = parameter.detach().to(at::kCPU, dtype && parameter.is_floating_point() ? *dtype : own,
                                            /*non_blocking=*/false, /*copy=*/true);
    copy.set_requires_grad(true);
    sources.push_back(parameter);
    copies.push_back(copy);
    named.emplace_back(name, std::move(copy));
  }
  if (sources.empty()) {
    throw std::invalid_argument(
        "[optimizer_parameters] the model has no trainable parameter; set requires_grad of what is to be trained");
  }
  auto made = std::make_shared<CopySteps>(CopySteps::Pipelines{shared_pipeline()}, std::vector<at::Tensor>());
  made->set_copies(std::move(sources), std::move(copies));
  copies_ = std::move(made);
  optimizer_parameters_ = std::move(named);
  trained_ = std::move(trained);
  copies_dtype_ = dtype;
  return optimizer_parameters_;
}

void HostWeights::publish_written() {
  if (copies_) copies_->publish_written_copies();
}

void HostWeights::step_by(std::function<void()> update, bool asynchronous) {
  if (!update) throw std::invalid_argument("[step] the function is empty, expected one that updates the parameters");
  optimizer_parameters();
  check_trainable();
  copies_->prepare_step(asynchronous);
  copies_->queue_step(std::move(update));
  is_behind_ = true;
  if (!asynchronous) copies_->settle_step();
}

void HostWeights::require_no_functions(const char* where) const {
  if (!copies_) return;
  throw std::invalid_argument(concat("[", where,
                                     "] the model's optimizer_parameters() are in use, and such a checkpoint is made "
                                     "and read by programs in Python alone, expected an Optimizer or one of libtorch"));
}

std::shared_ptr<ModelOptimizer> HostWeights::bind(const GroupOf& group_of, const std::function<void()>& accepted,
                                                  optim::Algorithm algorithm,
                                                  const std::vector<optim::Hyperparameters>& hyper,
                                                  optim::MomentFormat moments, bool gradients_in_fp32,
                                                  std::shared_ptr<cluster::Nodes> nodes) {
  const std::shared_ptr<runtime::Pipeline>& bound = shared_pipeline();
  std::unordered_map<const c10::TensorImpl*, int> groups;
  for (const auto& [name, parameter] : named_) {
    const c10::TensorImpl* const key = parameter.unsafeGetTensorImpl();
    if (parameter.requires_grad() && !groups.contains(key)) groups[key] = group_of(name, parameter);
  }
  if (groups.empty()) {
    throw std::invalid_argument(
        "[optimizer] the model has no trainable parameter; set requires_grad of what is to be trained");
  }
  if (copies_) {
    throw std::invalid_argument(
        "[optimizer] the model's optimizer_parameters() are in use, expected a model that is stepped in one way only; "
        "call model.step with a function, or make the model again");
  }
  accepted();
  OptimizerMemory memory = largest_optimizer(algorithm, hyper, moments);
  if (nodes) memory.nodes = static_cast<int>(nodes->size());
  core().memory().require_host("optimizer", memory, gradients_in_fp32);
  synchronize();
  std::vector<std::vector<int>> blocks;
  for (const BlockState& block : bound->model().blocks) {
    blocks.emplace_back();
    for (const memory::NamedTensor& parameter : block.block->parameters()) {
      const auto found = groups.find(parameter.tensor.unsafeGetTensorImpl());
      blocks.back().push_back(found == groups.end() ? -1 : found->second);
    }
  }
  if (gradients_in_fp32) bound->keep_gradients_in_fp32();
  auto made = std::make_shared<ModelOptimizer>(std::vector{bound}, std::vector<std::vector<std::vector<int>>>{blocks},
                                               algorithm, moments, std::move(nodes));
  made->set_groups(hyper);
  core().memory().count(memory);
  bound->gradients().set_shows_at_once(false);
  trained_.clear();
  for (const auto& [key, group] : groups) trained_.insert(key);
  optimizer_ = made;
  return made;
}

void HostWeights::check_trainable() const {
  if (!optimizer_ && !copies_) return;
  for (const auto& [name, parameter] : named_) {
    if (!parameter.requires_grad() || trained_.contains(parameter.unsafeGetTensorImpl())) continue;
    throw std::invalid_argument(concat("[model] parameter '", name,
                                       "' was frozen when the optimizer was made and requires grad now, so nothing "
                                       "would update it; set requires_grad first, then make the optimizer"));
  }
}

void HostWeights::prepare_step(ModelOptimizer& optimizer, bool asynchronous) {
  runtime::Pipeline& stepped = pipeline();
  if (optimizer_.get() != &optimizer) {
    throw std::invalid_argument(
        "[step] the optimizer was not made for this model, or another one was made since; make one with "
        "Optimizer(model, ...)");
  }
  check_trainable();
  stepped.planner().set_asynchronous(asynchronous);
  // With several nodes, the step tells them first.
  if (!optimizer.nodes()) stepped.raise_pending();
  optimizer.make_room();
}

std::shared_ptr<runtime::StepRun> HostWeights::start_step(std::vector<optim::Hyperparameters> groups,
                                                          const StepOptions& options, double loss_scale) {
  std::shared_ptr<runtime::StepRun> run = optimizer_->step(std::move(groups), options, loss_scale);
  is_behind_ = true;
  return run;
}

void HostWeights::require_plain(const char* where) const {
  if (copies_) {
    throw std::invalid_argument(concat("[", where,
                                       "] the model's optimizer_parameters() are in use, expected steps by a function: "
                                       "model.step([&] { optimizer.step(); optimizer.zero_grad(); })"));
  }
  if (!optimizer_) return;
  throw std::invalid_argument(concat("[", where,
                                     "] an Optimizer was made for this model and updates it in place, "
                                     "expected steps by it: model.step(optimizer)"));
}

}  // namespace roundpipe
