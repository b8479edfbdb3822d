#include <roundpipe/api/host_weights.h>

#include <algorithm>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include <roundpipe/api/grad_scaler.h>
#include <roundpipe/api/joint_steps.h>
#include <roundpipe/cluster/nodes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/runtime/model_optimizer.h>
#include <roundpipe/training/copy_steps.h>
#include <roundpipe/training/fused_steps.h>
#include <roundpipe/training/joint_training.h>
#include <roundpipe/training/model_core.h>
#include <roundpipe/training/prepared_gradients.h>
#include <roundpipe/training/scale_moves.h>

namespace roundpipe {

using runtime::ModelOptimizer;

namespace {

// Every parameter of what an optimizer is to step, under its names there. Throws std::invalid_argument for no models, a
// model or a name that is given twice, and parameters that cannot be stepped.
NamedParameters checked_names(const SteppedWeights& stepped) {
  if (stepped.models.empty()) throw std::invalid_argument("[optimizer] there are no models, expected at least one");
  NamedParameters named;
  std::unordered_set<std::string> paths, names;
  std::unordered_set<const HostWeights*> models;
  for (const auto& [path, model] : stepped.models) {
    if (model == nullptr)
      throw std::invalid_argument(concat("[optimizer] model '", path, "' is null, expected a model"));
    model->shared_core();  // refuses one that was moved from
    if (!paths.insert(path).second || !models.insert(model).second) {
      throw std::invalid_argument(
          concat("[optimizer] model '", path, "' is given twice, expected each model once, under a name of its own"));
    }
    add_named(named, path, model->parameter_names());
  }
  for (const auto& [name, parameter] : stepped.parameters) {
    if (!parameter.defined() || !parameter.is_cpu() || !parameter.is_leaf() || !parameter.is_floating_point()) {
      throw std::invalid_argument(concat("[optimizer] parameter '", name,
                                         "' of the program is no leaf of floating point on the CPU, expected one; "
                                         "make it as a torch::nn::Module does"));
    }
  }
  add_named(named, "", stepped.parameters);
  for (const auto& [name, parameter] : named) {
    if (names.insert(name).second) continue;
    throw std::invalid_argument(
        concat("[optimizer] two parameters are named '", name, "', expected a name of its own for each"));
  }
  return named;
}

}  // namespace

void add_named(NamedParameters& all, const std::string& path, const NamedParameters& named) {
  for (const auto& [name, tensor] : named) all.emplace_back(path.empty() ? name : concat(path, ".", name), tensor);
}

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
  copies_ = std::move(other.copies_);
  optimizer_parameters_ = std::move(other.optimizer_parameters_);
  copies_dtype_ = other.copies_dtype_;
  is_behind_ = other.is_behind_;
  return *this;
}

void HostWeights::leave_weights() noexcept {
  if (!core_) return;
  try {
    if (is_behind_ || (fused_ && fused_->is_behind())) synchronize();
  } catch (...) {
    // Work that nobody waited for has failed, or the engine has ended; then the modules keep what they have.
  }
  pipeline().release();
}

const std::shared_ptr<ModelCore>& HostWeights::shared_core() const {
  require_not_moved_from(core_ != nullptr, "model");
  return core_;
}

const std::shared_ptr<runtime::Pipeline>& HostWeights::shared_pipeline() const { return core().pipeline(); }

runtime::Pipeline& HostWeights::pipeline() const { return *shared_pipeline(); }

std::shared_ptr<ModelOptimizer> HostWeights::fused_optimizer() const {
  shared_pipeline();
  return fused_ ? fused_->optimizer() : nullptr;
}

const std::shared_ptr<FusedSteps>& HostWeights::fused_steps() const {
  shared_pipeline();
  return fused_;
}

std::shared_ptr<LossCounts> HostWeights::loss_counts() const {
  return fused_ && fused_->joint() ? fused_->joint()->counts() : nullptr;
}

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
  const std::vector<std::shared_ptr<runtime::Pipeline>> own{shared_pipeline()};
  for (const auto& each : fused_ ? fused_->pipelines() : own) {
    each->wait_buffers();
    const auto& scales = each->model().loss_scales;
    for (const auto& scale : scales->all()) scale->settle(scales);
  }
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
  if (fused_ && fused_->joint()) fused_->joint()->counts()->forget();
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
  if (fused_) fused_->show_host_weights();
}

void HostWeights::step_by(std::function<void()> update, const StepOptions& options) {
  if (!update) throw std::invalid_argument("[step] the function is empty, expected one that updates the parameters");
  check(options, /*several_nodes=*/false);
  require_own_norm(options);
  optimizer_parameters();
  check_trainable();
  copies_->prepare_step(options.asynchronous);
  const ScaleMoves::Pipelines models{shared_pipeline()};
  const auto decision = std::make_shared<LaterDecision>();
  at::Tensor scale;
  if (options.scaler != nullptr) {
    scale = options.scaler->moves().begin_step(models, /*several_nodes=*/false);
    // First, so that the function cannot move what the next losses have.
    options.scaler->moves().stepped(models, decision, scale, options.scaler->rule());
  }
  std::vector<at::Tensor> parameters;
  for (const auto& [name, parameter] : optimizer_parameters_) parameters.push_back(parameter);
  // Whether or not the function runs, the decision is over when it is dropped.
  std::shared_ptr<void> at_end(nullptr, [over = decision->over](void*) { over->fire(); });
  copies_->queue_step([copies = copies_.get(), update = std::move(update), parameters = std::move(parameters), scale,
                       decision, at_end = std::move(at_end), max_norm = options.max_grad_norm] {
    const PreparedGradients prepared = prepare_gradients(parameters, scale, max_norm);
    if (prepared.overflowed)
      copies->clear_gradients(/*set_to_none=*/true);
    else
      update();
    decision->overflowed = prepared.overflowed;
  });
  is_behind_ = true;
  if (options.asynchronous) return;
  copies_->settle_step();
  if (options.scaler != nullptr) options.scaler->moves().settle(models);
}

std::shared_ptr<FusedSteps> HostWeights::bind(const SteppedWeights& stepped, const GroupOf& group_of,
                                              const std::function<void()>& accepted, const FusedRule& rule,
                                              std::shared_ptr<cluster::Nodes> nodes) {
  NamedParameters named = checked_names(stepped);
  FusedSteps::Models models;
  FusedSteps::HostParameters host_parameters;
  for (const auto& [path, model] : stepped.models) models.push_back(model->core_);
  for (const auto& [name, parameter] : stepped.parameters) host_parameters.push_back({name, parameter});
  std::unordered_map<const c10::TensorImpl*, int> groups;
  std::vector<std::vector<at::Tensor>> members(rule.groups.size());
  for (const auto& [name, parameter] : named) {
    const c10::TensorImpl* const key = parameter.unsafeGetTensorImpl();
    if (!parameter.requires_grad() || groups.contains(key)) continue;
    groups[key] = group_of(name, parameter);
    members.at(static_cast<size_t>(groups[key])).push_back(parameter);
  }
  if (groups.empty()) {
    throw std::invalid_argument(
        "[optimizer] the model has no trainable parameter; set requires_grad of what is to be trained");
  }
  std::shared_ptr<FusedSteps> steps;
  for (const auto& [path, model] : stepped.models) {
    if (model->copies_) {
      throw std::invalid_argument(
          "[optimizer] the model's optimizer_parameters() are in use, expected a model that is stepped in one way "
          "only; call model.step with a function, or make the model again");
    }
    if (model->fused_ && !model->fused_->are(models, host_parameters)) {
      throw std::invalid_argument(concat(
          "[optimizer] ", model->pipeline().model().name,
          " has an Optimizer that steps it together with other models or parameters than these, expected the same "
          "ones in the same order; make the models again to step them otherwise"));
    }
    if (model->fused_) steps = model->fused_;
  }
  accepted();
  if (!steps) steps = std::make_shared<FusedSteps>(models, host_parameters);
  const bool is_alone = models.size() == 1 && host_parameters.empty();
  const std::string called = is_alone ? models[0]->pipeline()->model().name : "the models";
  const auto group = [&](const at::Tensor& parameter) {
    const auto found = groups.find(parameter.unsafeGetTensorImpl());
    return found == groups.end() ? -1 : found->second;
  };
  steps->require_room("optimizer", called, rule, group, nodes ? static_cast<int>(nodes->size()) : 1);
  steps->prepare_bind();
  std::shared_ptr<JointTraining> joint;
  if (nodes) {
    NamedParameters buffers;
    int layers = 0;
    for (const auto& [path, model] : stepped.models) {
      layers += model->pipeline().model().layer_count();
      add_named(buffers, path, model->buffers_);
    }
    const bool goes_on = steps->joint() && steps->optimizer()->nodes() == nodes;
    joint = agree_on_start({called, layers, named, buffers}, rule, std::move(members), nodes,
                           goes_on ? steps->joint() : nullptr);
  }
  steps->bind(rule, std::move(named), group, std::move(nodes), std::move(joint));
  for (const auto& [path, model] : stepped.models) model->fused_ = steps;
  return steps;
}

void HostWeights::check_trainable() const {
  refuse_late(fused_ ? fused_->late_parameter() : (copies_ ? copies_->late_parameter() : std::nullopt));
}

void HostWeights::refuse_late(const std::optional<std::string>& parameter) {
  if (!parameter) return;
  throw std::invalid_argument(concat("[model] parameter '", *parameter,
                                     "' was frozen when the optimizer was made and requires grad now, so nothing would "
                                     "update it; set requires_grad first, then make the optimizer"));
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
