#include <roundpipe/training/fused_steps.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <roundpipe/cluster/nodes.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/layers/host_parameters.h>
#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/muon.h>
#include <roundpipe/optim/thread_pool.h>

namespace roundpipe {

namespace {

using Parameters = FusedSteps::HostParameters;

// The parameters of some pipelines, and others beside them.
Parameters all_parameters(const std::vector<std::shared_ptr<runtime::Pipeline>>& pipelines, Parameters others) {
  for (const auto& pipeline : pipelines) {
    for (const runtime::BlockState& block : pipeline->model().blocks)
      others.insert(others.end(), block.block->parameters().begin(), block.block->parameters().end());
  }
  return others;
}

OptimizerMemory memory_of(const FusedRule& rule, const Parameters& parameters, const FusedSteps::GroupOf& group_of,
                          int nodes) {
  std::unordered_map<const c10::TensorImpl*, size_t> groups;
  for (const memory::NamedTensor& parameter : parameters) {
    const int group = group_of(parameter.tensor);
    if (group >= 0) groups[parameter.tensor.unsafeGetTensorImpl()] = static_cast<size_t>(group);
  }
  const auto options_of = [groups = std::move(groups), options = rule.groups](const at::Tensor& parameter) {
    const auto found = groups.find(parameter.unsafeGetTensorImpl());
    return found == groups.end() ? nullptr : &options.at(found->second);
  };
  return {rule.algorithm, rule.groups.front(), rule.format, nodes, rule.disk, rule.gradients_at_once, options_of};
}

FusedSteps::HostParameters each_once(const FusedSteps::HostParameters& parameters) {
  std::unordered_set<const c10::TensorImpl*> known;
  FusedSteps::HostParameters kept;
  for (const memory::NamedTensor& parameter : parameters) {
    if (known.insert(parameter.tensor.unsafeGetTensorImpl()).second) kept.push_back(parameter);
  }
  return kept;
}

}  // namespace

FusedSteps::FusedSteps(Models models, const HostParameters& host_parameters)
    : models_(std::move(models)), host_parameters_(each_once(host_parameters)) {
  for (const auto& model : models_) pipelines_.push_back(model->pipeline());
}

bool FusedSteps::are(const Models& models, const HostParameters& host_parameters) const {
  const auto same = [](const memory::NamedTensor& a, const memory::NamedTensor& b) {
    return a.name == b.name && a.tensor.is_same(b.tensor);
  };
  return models == models_ && std::ranges::equal(each_once(host_parameters), host_parameters_, same);
}

std::optional<int64_t> host_budget(const FusedSteps::Models& models) {
  std::optional<int64_t> smallest;
  for (const auto& model : models) {
    const std::optional<int64_t> own = model->memory().budget().host_bytes;
    if (own) smallest = std::min(*own, smallest.value_or(*own));
  }
  return smallest;
}

void FusedSteps::require_room(const char* where, const std::string& name, const FusedRule& rule,
                              const GroupOf& group_of, int nodes) const {
  const std::optional<int64_t> budget = host_budget(models_);
  if (!budget) return;
  const auto predict = [&](const OptimizerMemory& optimizer) {
    HostPrediction all;
    const auto add = [&](const simulate::HostMemory& part) {
      all.weights += part.weights;
      all.gradients += part.gradients;
      all.masters += part.masters;
      all.moments += part.moments;
      all.moments_on_disk += part.moments_on_disk;
      all.masters_on_disk += part.masters_on_disk;
    };
    for (const auto& model : models_) add(model->memory().host_with(optimizer, rule.gradients_in_fp32));
    for (const memory::NamedTensor& parameter : host_parameters_) {
      add(host_memory_of({{parameter.tensor}}, optimizer));
      if (rule.gradients_in_fp32) all.gradients += wider_gradient_bytes(parameter.tensor);
    }
    return all;
  };
  const Parameters parameters = all_parameters(pipelines_, host_parameters_);
  require_host(where, name, *budget, predict, memory_of(rule, parameters, group_of, nodes));
}

void FusedSteps::prepare_bind() {
  require_engine();
  optim::ThreadPool::current();
  instruction_set();
  synchronize();
}

void FusedSteps::bind(const FusedRule& rule, TrainedParameters::Named named, const GroupOf& group_of,
                      std::shared_ptr<cluster::Nodes> nodes, std::shared_ptr<JointTraining> joint) {
  check(rule.disk);
  for (const auto& [name, parameter] : named) {
    const int group = group_of(parameter);
    if (group < 0) continue;
    optim::check_sizes(rule.algorithm, rule.groups.at(static_cast<size_t>(group)), parameter.sizes(), name);
    optim::check_masters(rule.format.masters, parameter.scalar_type(), name);
  }
  if (rule.gradients_at_once && rule.gradients_in_fp32) {
    throw std::invalid_argument(
        "[optimizer] gradients are used at once, expected none in fp32, which are there to be summed over several "
        "calls");
  }
  if (!host_parameters_.empty() && !host_) {
    std::vector<std::unique_ptr<runtime::Layer>> layers;
    layers.push_back(layers::make_host_parameters("host", host_parameters_));
    host_ = std::make_shared<runtime::Pipeline>("host", std::move(layers), /*pinned=*/false);
    // Backwards outside of calls add to `.grad`, so loaded sums have to be there.
    host_->gradients().set_shows_at_once(true);
    pipelines_.push_back(host_);
  }
  std::vector<std::vector<std::vector<int>>> groups;
  for (const auto& pipeline : pipelines_) {
    auto& blocks = groups.emplace_back();
    for (const runtime::BlockState& block : pipeline->model().blocks) {
      auto& of_block = blocks.emplace_back();
      for (const memory::NamedTensor& parameter : block.block->parameters())
        of_block.push_back(group_of(parameter.tensor));
    }
    if (rule.gradients_in_fp32) pipeline->keep_gradients_in_fp32();
    pipeline->bound_gradients(rule.gradients_at_once && pipeline != host_);
  }
  const OptimizerMemory memory =
      memory_of(rule, all_parameters(pipelines_, {}), group_of, nodes ? static_cast<int>(nodes->size()) : 1);
  auto made =
      std::make_shared<runtime::ModelOptimizer>(pipelines_, groups, rule.algorithm, rule.format, std::move(nodes));
  made->set_groups(rule.groups);
  made->place_state(rule.disk, rule.groups);
  if (optimizer_) optimizer_->give_up_masters();
  made->take_masters();
  for (const auto& model : models_) {
    model->memory().count(memory);
    model->pipeline()->gradients().set_shows_at_once(false);
  }
  trained_ = TrainedParameters(std::move(named));
  optimizer_ = std::move(made);
  joint_ = std::move(joint);
}

void FusedSteps::prepare_step(bool asynchronous) {
  for (const auto& model : models_) model->pipeline()->planner().set_asynchronous(asynchronous);
  for (const auto& model : models_) model->pipeline()->raise_pending();
  optimizer_->make_room();
}

std::shared_ptr<runtime::StepRun> FusedSteps::start_step(std::vector<optim::Hyperparameters> groups,
                                                         const StepOptions& options, double loss_scale) {
  std::shared_ptr<runtime::StepRun> run = optimizer_->step(std::move(groups), options, loss_scale);
  hides_weights_ = true;
  is_behind_ = true;
  show_host_weights();
  return run;
}

double FusedSteps::measure_gradients() {
  prepare_step(/*asynchronous=*/false);
  return optimizer_->measure_gradients();
}

void FusedSteps::synchronize() {
  for (const auto& model : models_) model->pipeline()->drain();
  if (optimizer_) optimizer_->finish();
  hides_weights_ = false;
  is_behind_ = false;
  for (const auto& model : models_) model->pipeline()->expose();
}

void FusedSteps::show_weights() {
  bool shown = true;
  for (const auto& pipeline : pipelines_) shown &= pipeline->weights().show_newest();
  if (shown) hides_weights_ = false;
}

void FusedSteps::show_host_weights() {
  if (host_) host_->weights().show();
}

void FusedSteps::drop_gradients() {
  for (const auto& pipeline : pipelines_) pipeline->gradients().drop();
}

}  // namespace roundpipe
