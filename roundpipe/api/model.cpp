#include <roundpipe/api/model.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/utils/clip_grad.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/loss_check.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/runtime/engine.h>
#include <roundpipe/runtime/model/random.h>
#include <roundpipe/torch_compat/gradient_hooks.h>

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

std::shared_ptr<Pipeline> pipeline_of(const std::vector<Layer>& layers, const ModelOptions& options) {
  check(options.run);
  if (layers.empty()) throw std::invalid_argument("[model] there are no layers, expected at least one");
  const bool pinned = options.pin && Engine::current()->device_type() != c10::kCPU;
  std::vector<std::unique_ptr<runtime::Layer>> made;
  for (size_t l = 0; l < layers.size(); ++l) made.push_back(layers[l].for_engine(l));
  return std::make_shared<Pipeline>(options.name.empty() ? "Model" : options.name, std::move(made), pinned);
}

runtime::CallOptions call_options(const RunOptions& options, bool requires_grad) {
  runtime::CallOptions call;
  call.requires_grad = requires_grad;
  call.preserve_rng_state = options.preserve_rng_state;
  call.recompute_grain = options.recompute_grain;
  call.tied_grad_accumulation = options.tied_grad_accumulation;
  call.gradient_groups = options.gradient_groups;
  call.fault_tolerant = options.fault_tolerant;
  call.verify_every = options.verify_every;
  return call;
}

int device_count() { return Engine::current()->pool_size(); }

size_t bytes_of(const Values& values) {
  size_t bytes = 0;
  for (const at::Tensor& tensor : values.tensors) bytes += tensor.nbytes();
  return bytes;
}

// The largest microbatch of a step. `labels`: none if the caller takes the loss.
StepShape shape_of(const std::vector<Values>& inputs, const std::vector<Values>& labels) {
  size_t largest = 0;
  for (size_t m = 0; m < inputs.size(); ++m) {
    if (bytes_of(inputs[m]) > bytes_of(inputs[largest])) largest = m;
  }
  return {inputs[largest], labels.empty() ? Values() : labels[largest], static_cast<int>(inputs.size())};
}

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
    : HostWeights(pipeline_of(layers, options), named_in(layers, &Layer::parameters),
                  named_in(layers, &Layer::buffers)),
      layers_(std::move(layers)),
      run_options_(std::move(options.run)),
      check_loss_(options.check_loss && checks_losses()),
      arithmetic_(options.arithmetic),
      measure_steps_(options.measure_steps) {}

Model& Model::operator=(Model&& other) noexcept {
  if (this == &other) return *this;
  HostWeights::operator=(std::move(other));
  layers_ = std::move(other.layers_);
  container_ = std::move(other.container_);
  children_ = std::move(other.children_);
  run_options_ = std::move(other.run_options_);
  check_loss_ = other.check_loss_;
  measure_steps_ = other.measure_steps_;
  steps_within_cap_ = std::move(other.steps_within_cap_);
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

RecomputeGrain Model::admit(const std::vector<Values>& inputs, const std::vector<Values>& labels,
                            const LossFunction* loss, const RunOptions& options) {
  const std::shared_ptr<Engine> engine = Engine::current();
  if (!measure_steps_ || runtime::smallest_cap_bytes(*engine) == 0) return options.recompute_grain;
  const runtime::ModelState& model = pipeline().model();
  const StepShape shape = shape_of(inputs, labels);
  const runtime::PlanRequest request{loss != nullptr ? schedule::PlanMode::kFused : schedule::PlanMode::kTrain,
                                     shape.microbatches, options.gradient_groups, options.recompute_grain};
  const auto step = runtime::StepsWithinCap::step_of(model, options.route, request, shape.batch.tensors,
                                                     static_cast<int64_t>(bytes_of(shape.label)));
  if (!step) return options.recompute_grain;
  if (const std::optional<RecomputeGrain> known = steps_within_cap_.known(*step)) return *known;

  // No synchronize(), which would settle an asynchronous step.
  pipeline().drain();
  pipeline().wait_buffers();
  pipeline().weights().show();
  runtime::PlannedMemory planned{options.recompute_grain, {}, true};
  try {
    const simulate::StepSizes sizes =
        step_sizes(model, shape, options, measure_layers(model, shape, loss, engine->worker(0).device()));
    planned = runtime::plan_within_caps(pipeline(), options.route, request, sizes);
  } catch (const std::exception&) {
    // The step itself says what is wrong, or runs where a single layer did not.
  }
  steps_within_cap_.admit(*step, planned);
  return planned.grain;
}

std::vector<Values> Model::run(detail::Batch inputs, RunOptions options) {
  check(options);
  check_modules();
  const bool inference = c10::InferenceMode::is_enabled();
  const bool requires_grad = !inference && options.requires_grad.value_or(at::GradMode::is_enabled());
  inputs = detail::on_host(std::move(inputs), "forward");
  if (requires_grad) refuse_gradient_hooks(parameter_names());
  const int count = detail::count_of(inputs, options, device_count());
  const std::vector<Values> parts = detail::cut_inputs(inputs, count, options.cut_inputs);
  if (requires_grad) options.recompute_grain = admit(parts, {}, nullptr, options);
  // The engine's tensors are none of inference mode, even if its callers are in it.
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode grad_mode(requires_grad);
  return pipeline().forward(parts, call_options(options, requires_grad), options.route).microbatches;
}

struct Model::Request {
  std::vector<Values> inputs;
  std::vector<Values> labels;
  std::vector<runtime::LossRows> rows;
};

Model::Request Model::request(const char* where, detail::Batch inputs, detail::Batch labels,
                              const RunOptions& options) {
  check(options);
  check_modules();
  if (c10::InferenceMode::is_enabled() || !at::GradMode::is_enabled() || !options.requires_grad.value_or(true)) {
    throw std::invalid_argument(concat("[", where, "] gradients are off here, expected them on, as ", where,
                                       " makes them; leave the NoGradGuard or InferenceMode, or call forward"));
  }
  refuse_gradient_hooks(parameter_names());
  inputs = detail::on_host(std::move(inputs), where);
  labels = detail::on_host(std::move(labels), where);
  const int count = detail::count_of(inputs, options, device_count());
  Request made{
      detail::cut_inputs(inputs, count, options.cut_inputs), detail::cut_labels(labels, inputs, count, options), {}};
  made.rows = detail::loss_rows(made.inputs, inputs.is_cut ? std::vector<Cut>() : options.cut_inputs, made.labels,
                                labels.is_cut ? std::vector<Cut>() : options.cut_labels);
  return made;
}

Model::Pending Model::submit_cut(const char* where, detail::Batch inputs, detail::Batch labels, LossFunction loss,
                                 const RunOptions& options, bool keep_outputs, bool refuses_nan_early) {
  const Request made = request(where, std::move(inputs), std::move(labels), options);
  const RecomputeGrain grain = admit(made.inputs, made.labels, &loss, options);
  std::shared_ptr<runtime::Loss> of_call = make_loss(std::move(loss), made.rows, options.loss_reduction);
  runtime::CallOptions call = call_options(options, true);
  call.recompute_grain = grain;
  call.refuses_nan = check_loss_;
  call.refuses_nan_early = check_loss_ && refuses_nan_early;
  return Pending(shared_pipeline(),
                 pipeline().submit(made.inputs, made.labels, std::move(of_call), keep_outputs, call, options.route),
                 options.output_device);
}

runtime::Pipeline::Submitted& Model::Pending::submitted() const {
  require_not_moved_from(submitted_ != nullptr, "pending batch");
  return *submitted_;
}

TrainResult Model::Pending::finish() {
  Pipeline::Submitted& own = submitted();
  const Pipeline::TrainResult result = pipeline_->finish(own);
  // As after a plain backward, if the caller steps by the parameters' `.grad`.
  if (pipeline_->gradients().shows_at_once()) {
    pipeline_->drain();
    pipeline_->expose();
  }
  const at::NoGradGuard no_grad;
  TrainResult taken;
  for (size_t i = 0; i < result.losses.front().size(); ++i) {
    at::Tensor sum = result.losses.front()[i];
    for (size_t m = 1; m < result.losses.size(); ++m) sum = sum + result.losses[m][i];
    taken.loss = taken.loss.defined() ? taken.loss + sum : sum;
    taken.losses.push_back(std::move(sum));
  }
  if (!result.outputs.empty()) taken.outputs = detail::merged(result.outputs, output_device_);
  return taken;
}

std::vector<runtime::ExecutionRecord> Model::Pending::records() const { return submitted().log->records(); }

Step Model::step(Optimizer& optimizer, const StepOptions& options) {
  const std::shared_ptr<cluster::Nodes>& nodes = optimizer.core()->nodes();
  check(options, nodes != nullptr);
  const std::vector<optim::Hyperparameters>& groups = optimizer.options_of_step();
  // Now, so that a schedule that throws leaves everything as it was.
  const std::vector<double> next_rates = optimizer.rates_after(optimizer.steps() + 1);
  prepare_step(*optimizer.core(), options.asynchronous);
  runtime::StepOptions engine_options;
  engine_options.asynchronous = options.asynchronous;
  engine_options.max_norm = options.max_grad_norm.value_or(0);
  engine_options.gradient_factor = options.gradient_factor.value_or(nodes ? 1.0 / nodes->size() : 1.0);
  if (options.scaler != nullptr) engine_options.loss_scale = options.scaler->begin_step(pipeline(), nodes != nullptr);
  const std::shared_ptr<runtime::StepRun> run = start_step(groups, engine_options);
  optimizer.count_step(next_rates);
  if (options.scaler != nullptr) {
    options.scaler->stepped(pipeline(), run);
    // The scale of the next losses depends on these gradients.
    if (!options.asynchronous) options.scaler->synchronize(pipeline());
  }
  return Step(run);
}

Step Model::step(torch::optim::Optimizer& optimizer, const StepOptions& options) {
  check(options, /*several_nodes=*/false);
  require_plain("step");
  pipeline().planner().set_asynchronous(false);
  synchronize();
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      parameters.push_back(parameter);
      gradients.push_back(parameter.grad());
    }
  }
  bool overflowed = false;
  if (options.scaler != nullptr) {
    const at::NoGradGuard no_grad;
    const double scale = options.scaler->begin_step(pipeline(), false);
    at::Tensor found = at::zeros({1}, at::kFloat);
    const at::Tensor inverse = at::full({1}, 1.0 / scale, at::kFloat);
    if (!gradients.empty()) at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
    overflowed = found.item<float>() != 0;
  }
  double norm = std::nan("");
  if (options.max_grad_norm && !overflowed)
    norm = torch::nn::utils::clip_grad_norm_(parameters, *options.max_grad_norm);
  if (!overflowed) optimizer.step();
  if (options.scaler != nullptr) options.scaler->stepped(pipeline(), overflowed);
  optimizer.zero_grad();
  return Step(norm, overflowed);
}

MemoryPrediction Model::predict(detail::Batch inputs, detail::Batch labels, const LossFunction& loss,
                                const RunOptions& options) {
  const Request made = request("predict_memory", std::move(inputs), std::move(labels), options);
  // No synchronize(), which would settle an asynchronous step.
  pipeline().drain();
  pipeline().wait_buffers();
  named_parameters();
  return predict_step(pipeline(), shape_of(made.inputs, made.labels), loss, options, fused_optimizer().get());
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
