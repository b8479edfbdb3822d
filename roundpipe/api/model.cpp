#include <roundpipe/api/model.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include <ATen/core/grad_mode.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/runtime/call/loss_reduction.h>
#include <roundpipe/runtime/engine.h>
#include <roundpipe/runtime/model/random.h>
#include <roundpipe/runtime/model_optimizer.h>
#include <roundpipe/torch_compat/gradient_hooks.h>
#include <roundpipe/training/loss_counts.h>
#include <roundpipe/training/microbatch_choice.h>
#include <roundpipe/training/model_core.h>
#include <roundpipe/training/prepared_gradients.h>
#include <roundpipe/training/scale_moves.h>

namespace roundpipe {

using runtime::Engine;
using runtime::Pipeline;
using runtime::Values;

namespace {

std::vector<Layer> children_of(const torch::nn::Sequential& sequential) {
  std::vector<Layer> layers;
  for (const torch::nn::AnyModule& child : *sequential) layers.emplace_back(child);
  size_t place = 0;
  for (const auto& child : sequential->named_children()) layers.at(place++).named(child.key());
  return layers;
}

// All that the layers have of one kind, by the layer's name and the name in it.
NamedParameters named_in(const std::vector<Layer>& layers, const NamedParameters& (Layer::*kind)() const) {
  NamedParameters named;
  for (size_t l = 0; l < layers.size(); ++l) {
    for (const auto& [name, tensor] : (layers[l].*kind)())
      named.emplace_back(layers[l].name_or(l) + "." + name, tensor);
  }
  return named;
}

std::shared_ptr<ModelCore> core_of(const std::vector<Layer>& layers, const ModelOptions& options) {
  check(options.run);
  if (layers.empty()) throw std::invalid_argument("[model] there are no layers, expected at least one");
  if (options.host_memory) {
    std::vector<std::vector<at::Tensor>> tensors;
    for (const Layer& layer : layers) {
      for (const auto& [name, tensor] : layer.parameters()) tensors.push_back({tensor});
      for (const auto& [name, tensor] : layer.buffers()) tensors.push_back({tensor});
    }
    const auto predict = [&](const OptimizerMemory& optimizer) -> HostPrediction {
      return {host_memory_of(tensors, optimizer)};
    };
    require_host("model", options.name, *options.host_memory, predict, std::nullopt);
  }
  const bool pinned = options.pin && Engine::current()->device_type() != c10::kCPU;
  std::vector<std::unique_ptr<runtime::Layer>> made;
  for (size_t l = 0; l < layers.size(); ++l) made.push_back(layers[l].for_engine(l));
  const MemoryBudget budget{options.host_memory, options.device_memory, options.measure_steps};
  return std::make_shared<ModelCore>(
      std::make_shared<Pipeline>(options.name.empty() ? "Model" : options.name, std::move(made), pinned), budget,
      options.check_loss);
}

int device_count() { return Engine::current()->pool_size(); }

// Gradients are summed by the engine, which would not call hooks on them.
void refuse_gradient_hooks(const NamedParameters& parameters) {
  for (const auto& [name, parameter] : parameters) {
    if (!torch_compat::has_gradient_hooks(parameter)) continue;
    throw std::invalid_argument(
        concat("[model] parameter '", name,
               "' has a hook on its gradient, which nothing would call, expected none; call "
               "remove_hook, and change .grad after the backward, before the optimizer's step"));
  }
}

ModelOptions with_name(ModelOptions options, const char* name) {
  if (options.name.empty()) options.name = name;
  return options;
}

}  // namespace

Model::Model(const torch::nn::Sequential& layers, ModelOptions options)
    : Model(children_of(layers), with_name(std::move(options), "Sequential")) {
  container_ = layers.ptr();
  children_ = container_->children();
}

Model::Model(std::vector<Layer> layers, ModelOptions options)
    : HostWeights(core_of(layers, options), named_in(layers, &Layer::parameters), named_in(layers, &Layer::buffers)),
      layers_(std::move(layers)),
      run_options_(std::move(options.run)),
      arithmetic_(options.arithmetic) {}

Model& Model::operator=(Model&& other) noexcept {
  if (this == &other) return *this;
  HostWeights::operator=(std::move(other));
  layers_ = std::move(other.layers_);
  container_ = std::move(other.container_);
  children_ = std::move(other.children_);
  run_options_ = std::move(other.run_options_);
  arithmetic_ = other.arithmetic_;
  auto_microbatches_ = other.auto_microbatches_;
  return *this;
}

void Model::check_modules() const {
  pipeline();
  if (container_ && container_->children() != children_) {
    throw std::invalid_argument(concat("[model] children of the torch::nn::Sequential of ", name(),
                                       " were added or replaced since the model was made; make the model again"));
  }
  for (size_t l = 0; l < layers_.size(); ++l) layers_[l].require_unchanged(l);
  check_trainable();
}

std::vector<Values> Model::run(detail::Batch inputs, RunOptions options) {
  check(options);
  check_modules();
  publish_written();
  inputs = detail::on_host(std::move(inputs), "forward");
  if (ModelCore::makes_graph(options)) refuse_gradient_hooks(parameter_names());
  CallArguments cut;
  cut.inputs = detail::cut_inputs(inputs, count_of(inputs, options), options.cut_inputs);
  return core().forward(cut, std::move(options));
}

CallArguments Model::arguments(const char* where, detail::Batch inputs, detail::Batch labels, LossFunction loss,
                               const RunOptions& options) {
  check(options);
  check_modules();
  publish_written();
  ModelCore::require_gradients(where, options);
  refuse_gradient_hooks(parameter_names());
  inputs = detail::on_host(std::move(inputs), where);
  labels = detail::on_host(std::move(labels), where);
  const auto cut_into = [&](int count) {
    CallArguments cut;
    cut.inputs = detail::cut_inputs(inputs, count, options.cut_inputs);
    cut.labels = detail::cut_labels(labels, inputs, count, options);
    cut.loss = loss;
    cut.call_loss = make_loss(loss,
                              detail::loss_rows(cut.inputs, inputs.is_cut ? std::vector<Cut>() : options.cut_inputs,
                                                cut.labels, labels.is_cut ? std::vector<Cut>() : options.cut_labels),
                              options.loss_reduction);
    return cut;
  };
  return cut_into(count_to_train(inputs, options, cut_into));
}

int Model::count_of(const detail::Batch& inputs, const RunOptions& options) const {
  const bool chosen = options.microbatches == kAutoMicrobatches && auto_microbatches_;
  return detail::count_of(inputs, options, chosen ? *auto_microbatches_ : default_microbatches(device_count()));
}

int Model::count_to_train(const detail::Batch& inputs, const RunOptions& options,
                          const std::function<CallArguments(int count)>& cut) {
  if (options.microbatches != kAutoMicrobatches || auto_microbatches_ || inputs.is_cut)
    return count_of(inputs, options);
  const int most = detail::count_of(inputs, options, kMostMicrobatches);
  const MicrobatchChoice chosen = choose_microbatches(pipeline(), most, options.gradient_groups,
                                                      [&](int count) { return core().fits(cut(count), options); });
  tell_user(concat("[model] the number of microbatches of ", name(), " is ", chosen.count, " (", chosen.reason, ")"));
  auto_microbatches_ = chosen.count;
  return chosen.count;
}

void Model::set_auto_microbatches(std::optional<int> count) {
  if (count && *count < 1)
    throw std::invalid_argument(concat("[model] auto_microbatches is ", *count, ", expected at least 1 or none"));
  auto_microbatches_ = count;
}

Model::Pending Model::submit_cut(const char* where, detail::Batch inputs, detail::Batch labels, LossFunction loss,
                                 RunOptions options, bool keep_outputs, bool refuses_nan_early,
                                 std::shared_ptr<CallCount> own_loss) {
  if (const std::shared_ptr<LossCounts> counts = loss_counts(); counts && !own_loss) counts->note_users_loss();
  const CallArguments cut = arguments(where, std::move(inputs), std::move(labels), std::move(loss), options);
  const c10::Device output_device = options.output_device;
  return Pending(core().submit(cut, std::move(options), keep_outputs, refuses_nan_early), output_device,
                 std::move(own_loss));
}

PendingCall& Model::Pending::batch() const {
  require_not_moved_from(batch_ != nullptr, "pending batch");
  return *batch_;
}

TrainResult Model::Pending::finish() {
  CallResult result = noting_failure(own_loss_.get(), [&] { return batch().finish(); });
  const at::NoGradGuard no_grad;
  if (own_loss_ && own_loss_->loss_factor() != 1.0) {
    for (at::Tensor& loss : result.losses) loss = loss * own_loss_->loss_factor();
  }
  TrainResult taken;
  for (const at::Tensor& loss : result.losses) taken.loss = taken.loss.defined() ? taken.loss + loss : loss;
  taken.losses = std::move(result.losses);
  if (!result.outputs.empty()) taken.outputs = detail::merged(result.outputs, output_device_);
  return taken;
}

std::vector<runtime::ExecutionRecord> Model::Pending::records() const { return batch().records(); }

void Model::require_own(const char* where, const Optimizer& optimizer) const {
  if (fused_optimizer() == optimizer.core()) return;
  throw std::invalid_argument(concat("[", where,
                                     "] the optimizer was not made for this model, or another one was made since; "
                                     "make one with Optimizer(model, ...)"));
}

Step Model::step(Optimizer& optimizer, const StepOptions& options) {
  require_own("step", optimizer);
  return optimizer.step(options);
}

double Model::measure_gradients(Optimizer& optimizer) {
  require_own("measure_gradients", optimizer);
  return optimizer.measure_gradients();
}

Step Model::step(torch::optim::Optimizer& optimizer, const StepOptions& options) {
  check(options, /*several_nodes=*/false);
  require_own_norm(options);
  require_plain("step");
  pipeline().planner().set_asynchronous(false);
  synchronize();
  std::vector<at::Tensor> parameters;
  for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  at::Tensor scale;
  if (options.scaler != nullptr)
    scale = options.scaler->moves().begin_step({shared_pipeline()}, /*several_nodes=*/false);
  const PreparedGradients prepared = prepare_gradients(parameters, scale, options.max_grad_norm);
  if (!prepared.overflowed) optimizer.step();
  if (options.scaler != nullptr)
    options.scaler->moves().stepped({shared_pipeline()}, options.scaler->rule(), prepared.overflowed);
  optimizer.zero_grad();
  return Step(prepared.norm, prepared.overflowed);
}

void Model::step(std::function<void()> update, bool asynchronous) {
  step(std::move(update), {.asynchronous = asynchronous});
}

void Model::step(std::function<void()> update, const StepOptions& options) { step_by(std::move(update), options); }

MemoryPrediction Model::predict(detail::Batch inputs, detail::Batch labels, const LossFunction& loss,
                                const RunOptions& options) {
  return core().predict_memory(arguments("predict_memory", std::move(inputs), std::move(labels), loss, options),
                               options);
}

RunOptions& Model::run_options() {
  pipeline();
  return run_options_;
}

const std::string& Model::name() const { return pipeline().model().name; }
int Model::layers() const { return pipeline().model().layer_count(); }
const std::optional<schedule::Plan>& Model::last_plan() const { return pipeline().last_plan(); }
const std::optional<schedule::Plan>& Model::last_step_plan() const { return pipeline().last_step_plan(); }
schedule::LayerCosts Model::costs() const { return pipeline().planner().costs(); }
std::optional<double> Model::busy_share() { return pipeline().busy_share(); }
int64_t Model::verified_jobs() const { return pipeline().model().verified_jobs; }
std::vector<runtime::ExecutionRecord> Model::last_records() const { return pipeline().last_records(); }

uint64_t Model::layer_seed(uint64_t call, int microbatch, int layer, bool backward) const {
  const uint64_t seed = runtime::layer_seed(random_seed(), name(), call, microbatch, layer);
  return backward ? runtime::backward_seed(seed) : seed;
}
uint64_t Model::random_seed() const { return pipeline().random_seed(); }
void Model::set_random_seed(uint64_t seed) { pipeline().set_random_seed(seed); }
uint64_t Model::calls() const { return pipeline().calls(); }
void Model::set_calls(uint64_t calls) { pipeline().set_calls(calls); }

}  // namespace roundpipe
