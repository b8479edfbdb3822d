#include <roundpipe/runs/model_parts.h>

#include <stdexcept>
#include <unordered_map>

#include <roundpipe/core/error.h>
#include <roundpipe/core/loss_chunks.h>
#include <roundpipe/optim/option_names.h>
#include <roundpipe/runs/optimizer_options.h>
#include <roundpipe/runs/torch_optimizer.h>
#include <roundpipe/runtime/engine.h>
#include <roundpipe/saving/contents.h>

namespace roundpipe {

namespace {

TrainedModel parts_of(const std::string& path, Model& model) {
  const std::shared_ptr<runtime::Engine> pool = runtime::Engine::current();
  const RunOptions& options = model.run_options();
  TrainedModel parts{.path = path,
                     .pipeline = model.shared_pipeline(),
                     .name = model.name(),
                     .microbatches = options.microbatches == kAutoMicrobatches
                                         ? model.auto_microbatches()
                                         : options.microbatches.value_or(default_microbatches(pool->pool_size())),
                     .chunk_logit_bytes = options.chunk_logit_bytes};
  if (options.chunk_logit_bytes && *options.chunk_logit_bytes <= 0)
    parts.chunk_logit_bytes = chunk_logit_bytes(pool->worker(0).device().is_virtual());
  if (model.arithmetic()) parts.arithmetic = arithmetic_name(*model.arithmetic());
  return parts;
}

}  // namespace

ModelGroup group_of(Model& model) { return {{{"", &model}}}; }

std::vector<TrainedModel> parts_of(const ModelGroup& group) {
  std::vector<TrainedModel> parts;
  for (const auto& [path, model] : group.models) parts.push_back(parts_of(path, *model));
  return parts;
}

ModelNames names_of(const ModelGroup& group, const LeavesOut& leaves_out) {
  NamedParameters parameters, buffers;
  for (const auto& [path, model] : group.models) {
    add_named(parameters, path, model->parameter_names());
    add_named(buffers, path, model->buffer_names());
  }
  add_named(parameters, "", group.parameters);
  add_named(buffers, "", group.buffers);
  return {parameters, buffers, leaves_out};
}

std::vector<std::shared_ptr<runtime::Pipeline>> pipelines_of(const ModelGroup& group) {
  if (const auto& fused = group.models.at(0).second->fused_steps()) return fused->pipelines();
  std::vector<std::shared_ptr<runtime::Pipeline>> pipelines;
  for (const auto& [path, model] : group.models) pipelines.push_back(model->shared_pipeline());
  return pipelines;
}

FusedOptimizer fused_of(const Optimizer& optimizer) {
  return {optimizer.core(), optimizer.algorithm(), optimizer.moments(), optimizer.all_options()};
}

TrainedOptimizer parts_of(Optimizer& optimizer, const ModelNames& names) {
  TrainedOptimizer parts{optim::option_names(optimizer.algorithm()).class_name, moments_name(optimizer.moments()), {}};
  const std::vector<double>& first_rates = optimizer.first_rates();
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    const std::optional<double> first = first_rates.empty() ? std::nullopt : std::optional(first_rates[i]);
    parts.groups.push_back({options_dict(optimizer.algorithm(), optimizer.all_options()[i], first), {}});
  }
  runtime::ModelOptimizer& core = *optimizer.core();
  std::unordered_map<const c10::TensorImpl*, int> groups;
  for (size_t b = 0; b < core.block_count(); ++b) {
    const runtime::ModelOptimizer::BlockContents block = core.contents(b);
    const std::vector<memory::NamedTensor>& parameters = block.state->block->parameters();
    for (size_t p = 0; p < parameters.size(); ++p)
      groups[parameters[p].tensor.unsafeGetTensorImpl()] = block.optimizer->group(p);
  }
  for (const auto& [name, parameter] : names.parameters) {
    const int group = groups.at(parameter.unsafeGetTensorImpl());
    if (group >= 0) parts.groups.at(static_cast<size_t>(group)).parameters.push_back(parameter);
  }
  return parts;
}

TrainedOptimizer parts_of(const torch::optim::Optimizer& optimizer, const char* where) {
  const optim::Algorithm algorithm = algorithm_of(optimizer, where);
  TrainedOptimizer parts{optim::option_names(algorithm).class_name, kMomentsOfTorch, {}};
  const std::vector<optim::Hyperparameters> options = options_of(optimizer);
  for (size_t i = 0; i < options.size(); ++i)
    parts.groups.push_back({options_dict(algorithm, options[i], std::nullopt), optimizer.param_groups()[i].params()});
  return parts;
}

std::vector<GivenValue> schedules_of(const Optimizer& optimizer) {
  const std::vector<double>& first_rates = optimizer.first_rates();
  if (first_rates.empty()) return {};
  StateValue::List base(first_rates.begin(), first_rates.end()), last;
  for (const optim::Hyperparameters& group : optimizer.all_options()) last.emplace_back(group.lr);
  return {{StateValue::dict({{"base_lrs", std::move(base)},
                             {"last_epoch", optimizer.steps()},
                             {"_step_count", optimizer.steps() + 1},
                             {"_last_lr", std::move(last)},
                             {"lr_lambdas", StateValue::List(first_rates.size())}}),
           /*is_state_dict=*/true}};
}

FusedSteps::Models cores_of(const ModelGroup& group) {
  FusedSteps::Models models;
  for (const auto& [path, model] : group.models) models.push_back(model->shared_core());
  return models;
}

bool steps_all_of(const FusedSteps& steps, const ModelGroup& group) {
  FusedSteps::HostParameters parameters;
  for (const auto& [name, parameter] : group.parameters) parameters.push_back({name, parameter});
  return steps.are(cores_of(group), parameters);
}

void require_whole_optimizer(const char* where, const ModelGroup& group, const Optimizer& optimizer) {
  const bool is_newest = optimizer.fused_steps()->optimizer() == optimizer.core();
  if (!is_newest || !steps_all_of(*optimizer.fused_steps(), group)) {
    throw std::invalid_argument(concat("[", where,
                                       "] the optimizer was not made for this model, or another one was made since, "
                                       "expected the one that steps it"));
  }
  if (!optimizer.core()->nodes()) return;
  throw std::invalid_argument(concat("[", where,
                                     "] the optimizer keeps a part of its state on each of several nodes, expected one "
                                     "node; save and load such checkpoints with the Python package"));
}

}  // namespace roundpipe
