#include <roundpipe/api/host_weights.h>

#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include <torch/version.h>

#include <roundpipe/cluster/nodes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/optim/option_names.h>
#include <roundpipe/runtime/model_optimizer.h>
#include <roundpipe/training/copy_steps.h>
#include <roundpipe/training/fused_steps.h>
#include <roundpipe/training/joint_training.h>
#include <roundpipe/training/model_core.h>

namespace roundpipe {

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
  fused_ = std::move(other.fused_);
  joint_ = std::move(other.joint_);
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

std::shared_ptr<ModelOptimizer> HostWeights::fused_optimizer() const {
  shared_pipeline();
  return fused_ ? fused_->optimizer() : nullptr;
}

std::shared_ptr<LossCounts> HostWeights::loss_counts() const { return joint_ ? joint_->counts() : nullptr; }

const std::shared_ptr<CopySteps>& HostWeights::copy_steps() const {
  shared_pipeline();
  return copies_;
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
  if (copies_) {
    copies_->synchronize();
  } else if (fused_) {
    fused_->synchronize();
  } else {
    pipeline().drain();
    pipeline().expose();
  }
  is_behind_ = false;
  pipeline().wait_buffers();
  const auto& scales = pipeline().model().loss_scales;
  for (const auto& scale : scales->all()) scale->settle(scales);
}

const NamedParameters& HostWeights::named_parameters() {
  if (copies_)
    copies_->show_weights();
  else if (fused_)
    fused_->show_weights();
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
  if (joint_) joint_->counts()->forget();
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
  if (fused_) {
    throw std::invalid_argument(
        "[optimizer_parameters] an Optimizer was made for this model and updates it in place, expected a model that is "
        "stepped in one way only; use model.step(optimizer), or make the model again");
  }
  synchronize();
  std::vector<at::Tensor> sources, copies;
  NamedParameters named;
  std::unordered_set<const c10::TensorImpl*> copied;
  for (const auto& [name, parameter] : named_) {
    if (!parameter.requires_grad() || !copied.insert(parameter.unsafeGetTensorImpl()).second) continue;
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
  made->set_copies(named_, std::move(sources), std::move(copies));
  copies_ = std::move(made);
  optimizer_parameters_ = std::move(named);
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

std::shared_ptr<ModelOptimizer> HostWeights::bind(const GroupOf& group_of, const std::function<void()>& accepted,
                                                  const FusedRule& rule, std::shared_ptr<cluster::Nodes> nodes) {
  pipeline();
  std::unordered_map<const c10::TensorImpl*, int> groups;
  std::vector<std::vector<at::Tensor>> members(rule.groups.size());
  for (const auto& [name, parameter] : named_) {
    const c10::TensorImpl* const key = parameter.unsafeGetTensorImpl();
    if (!parameter.requires_grad() || groups.contains(key)) continue;
    groups[key] = group_of(name, parameter);
    members.at(static_cast<size_t>(groups[key])).push_back(parameter);
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
  auto steps = fused_ ? fused_ : std::make_shared<FusedSteps>(FusedSteps::Models{core_}, FusedSteps::HostParameters());
  steps->require_room("optimizer", pipeline().model().name, rule, nodes ? static_cast<int>(nodes->size()) : 1);
  steps->prepare_bind();
  const auto group = [&](const at::Tensor& parameter) {
    const auto found = groups.find(parameter.unsafeGetTensorImpl());
    return found == groups.end() ? -1 : found->second;
  };
  std::shared_ptr<JointTraining> joint = nodes ? joined(rule, std::move(members), nodes) : nullptr;
  steps->bind(rule, named_, group, std::move(nodes));
  fused_ = std::move(steps);
  joint_ = std::move(joint);
  return fused_->optimizer();
}

// What the nodes have agreed on, the optimizer with it.
std::shared_ptr<JointTraining> HostWeights::joined(const FusedRule& rule, std::vector<std::vector<at::Tensor>> groups,
                                                   const std::shared_ptr<cluster::Nodes>& nodes) const {
  const bool joins = !joint_ || fused_optimizer()->nodes() != nodes;
  std::shared_ptr<JointTraining> joint = joint_;
  if (joins) {
    const runtime::ModelState& model = pipeline().model();
    joint =
        std::make_shared<JointTraining>(std::make_shared<cluster::Agreement>(nodes->control(), model.name),
                                        ModelTraits{ROUNDPIPE_VERSION, TORCH_VERSION, model.name, model.layer_count()});
  }
  OptimizerTraits traits{optim::option_names(rule.algorithm).class_name, {}, std::move(groups), {}};
  for (const optim::Hyperparameters& options : rule.groups) traits.options.push_back(describe(rule.algorithm, options));
  traits.format = {{"moments", rule.moments == optim::MomentFormat::kFloat32 ? "float32" : "8bit"},
                   {"gradients_in_fp32", rule.gradients_in_fp32 ? "true" : "false"}};
  joint->agree_on_start(traits, named_, joins ? buffers_ : NamedParameters());
  return joint;
}

StepOptions HostWeights::agree_on_step(optim::Algorithm algorithm, const std::vector<optim::Hyperparameters>& groups,
                                       const StepOptions& options, double loss_scale) {
  if (!joint_) return options;
  const auto number = [](std::optional<double> given) { return given ? shortest(*given) : "none"; };
  std::vector<cluster::Told> told;
  for (const optim::Hyperparameters& group : groups) told.push_back(describe(algorithm, group));
  const double factor = joint_->step({{"asynchronous", options.asynchronous ? "true" : "false"},
                                      {"max_grad_norm", number(options.max_grad_norm)},
                                      {"gradient_factor", number(options.gradient_factor)},
                                      {"the loss scale", number(loss_scale)}},
                                     told, !fused_->hides_weights());
  StepOptions agreed = options;
  if (!agreed.gradient_factor) agreed.gradient_factor = factor;
  return agreed;
}

void HostWeights::check_trainable() const {
  const std::optional<std::string> late =
      fused_ ? fused_->late_parameter() : (copies_ ? copies_->late_parameter() : std::nullopt);
  if (!late) return;
  throw std::invalid_argument(concat("[model] parameter '", *late,
                                     "' was frozen when the optimizer was made and requires grad now, so nothing would "
                                     "update it; set requires_grad first, then make the optimizer"));
}

void HostWeights::prepare_step(const ModelOptimizer& optimizer, bool asynchronous) {
  if (fused_optimizer().get() != &optimizer) {
    throw std::invalid_argument(
        "[step] the optimizer was not made for this model, or another one was made since; make one with "
        "Optimizer(model, ...)");
  }
  try {
    check_trainable();
    fused_->prepare_step(asynchronous);
  } catch (const std::exception& error) {
    if (joint_ && !frontend().is_interrupt(std::current_exception()))
      joint_->counts()->tell_failure(frontend().said(error));
    throw;
  }
}

std::shared_ptr<runtime::StepRun> HostWeights::start_step(std::vector<optim::Hyperparameters> groups,
                                                          const StepOptions& options, double loss_scale) {
  std::shared_ptr<runtime::StepRun> run = fused_->start_step(std::move(groups), options, loss_scale);
  is_behind_ = true;
  return run;
}

void HostWeights::require_plain(const char* where) const {
  if (copies_) {
    throw std::invalid_argument(concat("[", where,
                                       "] the model's optimizer_parameters() are in use, expected steps by a function: "
                                       "model.step([&] { optimizer.step(); optimizer.zero_grad(); })"));
  }
  if (!fused_) return;
  throw std::invalid_argument(concat("[", where,
                                     "] an Optimizer was made for this model and updates it in place, "
                                     "expected steps by it: model.step(optimizer)"));
}

}  // namespace roundpipe
