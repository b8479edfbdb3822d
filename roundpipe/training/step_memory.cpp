#include <roundpipe/training/step_memory.h>

#include <algorithm>
#include <span>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/memory/crossing.h>
#include <roundpipe/runtime/model/layer_sizes.h>
#include <roundpipe/training/layer_meter.h>

namespace roundpipe {

using runtime::Engine;
using runtime::Values;
using simulate::DeviceMemory;
using simulate::LayerFootprint;

namespace {

// Steps that a prediction follows: each step assigns devices again.
constexpr int kSteps = 3;

// The size of dimension 0, along which a microbatch can be cut.
int64_t count_rows(const Values& values) {
  int64_t rows = -1;
  for (const at::Tensor& tensor : values.tensors) {
    if (tensor.dim() > 0) rows = std::max(rows, tensor.size(0));
  }
  return rows < 0 ? 1 : rows;
}

std::vector<LayerFootprint> scaled(const std::vector<LayerFootprint>& footprints, int64_t rows, int64_t measured) {
  std::vector<LayerFootprint> result;
  for (const LayerFootprint& footprint : footprints) result.push_back(simulate::scaled(footprint, rows, measured));
  return result;
}

}  // namespace

int64_t StepShape::rows() const { return count_rows(batch); }
int64_t StepShape::label_bytes() const { return memory::settled_bytes(label.tensors); }

StepShape shape_of(const std::vector<Values>& inputs, const std::vector<std::shared_ptr<const void>>& structures,
                   const std::vector<Values>& labels, LossFunction loss, schedule::PlanMode mode,
                   const RunOptions& options, std::vector<std::string> savers) {
  StepShape shape;
  size_t largest = 0;
  int64_t most_bytes = 0;
  shape.total_rows = 0;
  for (size_t m = 0; m < inputs.size(); ++m) {
    const int64_t bytes = memory::settled_bytes(inputs[m].tensors);
    if (bytes > most_bytes) largest = m;
    most_bytes = std::max(most_bytes, bytes);
    shape.total_rows += count_rows(inputs[m]);
  }
  shape.batch = inputs[largest];
  if (!structures.empty()) shape.batch.structure = structures[largest];
  if (!labels.empty()) shape.label = labels[largest];
  shape.loss = std::move(loss);
  shape.microbatches = static_cast<int>(inputs.size());
  shape.mode = mode;
  shape.options = options;
  shape.savers = std::move(savers);
  return shape;
}

StepMemory::StepMemory(runtime::Pipeline& pipeline, MemoryBudget budget)
    : pipeline_(pipeline),
      budget_(budget),
      has_emulated_(std::ranges::any_of(pipeline.model().layers, [](const std::unique_ptr<runtime::LayerState>& state) {
        return !state->layer->takes_memory();
      })) {
  if (!has_emulated_) return;
  budget_.device_bytes.reset();
  budget_.measures = false;
}

RecomputeGrain StepMemory::admit(const StepShape& step) {
  if (!budget_.device_bytes) return admit_within_caps(step);
  const std::shared_ptr<Engine> engine = Engine::current();
  std::vector<Admitted>& admitted = admitted_[concat(
      kind_of(step), " ", step.microbatches, " ", step.options.gradient_groups, " ", static_cast<int>(step.mode), " ",
      static_cast<int>(step.options.recompute_grain), " ", engine->size())];
  const Sizes own = sizes_of(step);
  auto as = std::ranges::find_if(
      admitted, [&](const Admitted& each) { return std::ranges::equal(own, each.sizes, std::ranges::less_equal()); });
  if (as == admitted.end()) {
    compare();
    const RecomputeGrain grain = fit(step, *budget_.device_bytes);
    as = admitted.insert(admitted.end(), {own, grain});
  }
  // Not before: a step that is refused leaves the devices as they were.
  runtime::limit_memory(*engine, *budget_.device_bytes);
  return as->grain;
}

RecomputeGrain StepMemory::admit_within_caps(const StepShape& step) {
  const RecomputeGrain grain = step.options.recompute_grain;
  if (!budget_.measures || runtime::smallest_cap_bytes(*Engine::current()) == 0) return grain;
  const auto admitted = runtime::StepsWithinCap::step_of(pipeline_.model(), step.options.route, request(step, grain),
                                                         step.batch.tensors, step.label_bytes());
  if (!admitted) return grain;
  if (const std::optional<RecomputeGrain> known = within_cap_.known(*admitted)) return *known;
  runtime::PlannedMemory planned{grain, {}, true};
  try {
    planned = runtime::plan_within_caps(pipeline_, step.options.route, request(step, grain),
                                        sizes(step, grain, footprints(step)));
  } catch (const std::exception&) {
    // The step itself says what is wrong, or runs where a single layer did not.
    if (frontend().is_interrupt(std::current_exception())) throw;
  }
  within_cap_.admit(*admitted, planned);
  return planned.grain;
}

bool StepMemory::fits(const StepShape& step) {
  if (!budget_.device_bytes) return true;
  return least(step, footprints(step), *budget_.device_bytes).device.needed() <= *budget_.device_bytes;
}

MemoryPrediction StepMemory::predict(const StepShape& step) {
  const Footprints& measured = footprints(step);
  MemoryPrediction predicted;
  predicted.recompute_grain = step.options.recompute_grain;
  if (!budget_.device_bytes && budget_.measures && step.trains()) {
    const runtime::PlannedMemory planned =
        runtime::plan_within_caps(pipeline_, step.options.route, request(step, predicted.recompute_grain),
                                  sizes(step, predicted.recompute_grain, measured));
    predicted.recompute_grain = planned.grain;
    predicted.device = planned.device;
  } else {
    tell_planner(step, measured, predicted.recompute_grain);
    predicted.device = on_device(step, predicted.recompute_grain, measured,
                                 budget_.device_bytes.value_or(runtime::smallest_cap_bytes(*Engine::current())));
  }
  predicted.host = on_host(step, predicted.recompute_grain, optimizer_.value_or(OptimizerMemory()));
  predicted.activations = activations(step, predicted.recompute_grain);
  return predicted;
}

std::optional<MemoryPrediction> StepMemory::last() const {
  std::optional<MemoryPrediction> last = last_;
  if (last) last->measured_bytes = peak_bytes();
  return last;
}

RecomputeGrain StepMemory::fit(const StepShape& step, int64_t budget_bytes) {
  const Footprints& measured = footprints(step);
  const Least tried = least(step, measured, budget_bytes);
  const auto predict = [&](const OptimizerMemory& optimizer) { return on_host(step, tried.grain, optimizer); };
  last_ = {tried.device, std::nullopt, predict(optimizer_.value_or(OptimizerMemory())), tried.grain,
           activations(step, tried.grain)};
  const std::string& name = pipeline_.model().name;
  if (budget_.host_bytes) roundpipe::require_host("RoundPipe", name, *budget_.host_bytes, predict, optimizer_);
  if (tried.device.needed() > budget_bytes) {
    const auto larger = [](int64_t bytes) { return frontend().option("device_memory", format_bytes(bytes)); };
    throw BudgetExceeded(
        concat(memory_table(concat("[RoundPipe] a step of ", name, " does not fit on a device:"), rows_of(tried.device),
                            {{"device_memory", budget_bytes}}),
               "\nsmallest change that would fit: ", change(step, measured, budget_bytes, larger, nullptr)));
  }
  return tried.grain;
}

StepMemory::Least StepMemory::least(const StepShape& step, const Footprints& measured, int64_t budget_bytes) {
  const RecomputeGrain grain = step.options.recompute_grain;
  const runtime::PlannedMemory planned = runtime::plan_within(pipeline_, step.options.route, request(step, grain),
                                                              sizes(step, grain, measured), limit(budget_bytes));
  return {planned.grain, planned.device};
}

std::string StepMemory::explain(const std::function<StepShape(int64_t rows)>& shape, int64_t rows, int64_t cap_bytes) {
  if (has_emulated_) throw std::invalid_argument("emulated layers take time, not memory");
  const StepShape step = shape(rows);
  const auto [measured, measured_rows] = footprints_of_some(shape, rows);
  const DeviceMemory wanted = on_device(step, RecomputeGrain::kLayer, measured, cap_bytes);
  std::string title =
      concat("layer by layer, a step of ", pipeline_.model().name, " is predicted to take on the fullest device");
  if (measured_rows < rows)
    title += concat(" (worked out from ", measured_rows, " of ", rows, " rows, as more did not fit)");
  MemoryRows beside;
  if (cap_bytes > 0) beside = {{"the device's cap", cap_bytes}};
  std::string text = memory_table(title + ":", rows_of(wanted), beside);
  if (cap_bytes == 0) return text;
  const double correction = correction_;
  const auto restore = [&] {
    correction_ = correction;
    if (budget_.device_bytes) tell_planner(step, measured, last_ ? last_->recompute_grain : RecomputeGrain::kStage);
  };
  try {
    if (wanted.needed() <= cap_bytes) {
      // It did not fit, so the unpredicted part takes at least the rest.
      correction_ *= 1 + static_cast<double>(cap_bytes - wanted.needed() + 1) /
                             static_cast<double>(std::max<int64_t>(1, wanted.work));
      text +=
          "\nthat would have fitted: something else is on the device, or a layer takes more than when it was measured. "
          "If it takes as much as did not fit:";
    }
    const auto larger = [](int64_t bytes) { return "a cap of " + frontend().quoted(format_bytes(bytes)); };
    text += concat("\nsmallest change that would fit: ",
                   change(step, measured, cap_bytes, larger, [&](int64_t some) { return footprints(shape(some)); }));
  } catch (...) {
    restore();
    throw;
  }
  restore();
  return text;
}

std::string StepMemory::describe_layers() const {
  const std::vector<simulate::LayerBytes> layers = runtime::layer_sizes(pipeline_.model());
  const auto most = std::ranges::max_element(
      layers, {}, [](const simulate::LayerBytes& layer) { return layer.weights + layer.sums; });
  return concat("the largest layer takes ", format_bytes(most->weights), " for its weights and, in a backward, ",
                format_bytes(most->sums), " for gradients");
}

std::pair<StepMemory::Footprints, int64_t> StepMemory::footprints_of_some(
    const std::function<StepShape(int64_t rows)>& shape, int64_t rows) {
  for (int64_t measured = rows;; measured = (measured + 1) / 2) {
    Footprints found;
    const std::exception_ptr full =
        runtime::out_of_memory_in([&] { found = scaled(footprints(shape(measured)), rows, measured); });
    if (!full) return {found, measured};
    if (measured == 1) std::rethrow_exception(full);
  }
}

std::string StepMemory::change(const StepShape& step, const Footprints& measured, int64_t budget_bytes,
                               const std::function<std::string(int64_t bytes)>& larger,
                               const std::function<Footprints(int64_t rows)>& measure) {
  const int64_t rows = step.rows();
  const auto count_with = [&](int64_t left) { return static_cast<int>((step.total_rows + left - 1) / left); };
  // With as many microbatches as needed for at most this many rows each.
  const auto taken = [&](int64_t left, const Footprints& smaller) {
    StepShape cut = step;
    cut.microbatches = count_with(left);
    if (budget_.device_bytes) tell_planner(cut, smaller, RecomputeGrain::kLayer);
    return on_device(cut, RecomputeGrain::kLayer, smaller, budget_bytes);
  };
  const auto in_proportion = [&](int64_t left) { return taken(left, scaled(measured, left, rows)); };

  // Bisects for the most rows that fit: fewer rows take less.
  int64_t fits = 0;
  int64_t too_many = rows;
  while (too_many - fits > 1) {
    const int64_t left = (fits + too_many) / 2;
    (in_proportion(left).needed() <= budget_bytes ? fits : too_many) = left;
  }
  while (fits > 0 && measure && taken(fits, measure(fits)).needed() > budget_bytes)
    fits -= std::max<int64_t>(1, fits / 16);
  if (fits > 0) {
    return concat(frontend().option("microbatches", std::to_string(count_with(fits))), " and ",
                  frontend().option("recompute_grain", "layer"));
  }
  const DeviceMemory one = in_proportion(1);
  const DeviceMemory wanted = on_device(step, RecomputeGrain::kLayer, measured, budget_bytes);
  const std::string more = larger(std::max(wanted.needed(), budget_bytes + 1));
  if (one.weights + one.gradients > budget_bytes) {
    return concat(more, ". No number of microbatches helps, and no shorter rows: weights and gradients alone take ",
                  format_bytes(one.weights + one.gradients), ". Layers split into smaller ones, or adapters, would");
  }
  std::string savers = "shorter rows";
  for (const std::string& saver : step.savers) savers += ", " + saver;
  return concat(more, ". No number of microbatches helps: one row takes ", format_bytes(one.needed()), ". Or ", savers);
}

const StepMemory::Footprints& StepMemory::footprints(const StepShape& step) {
  const std::pair key{kind_of(step), sizes_of(step)};
  const auto known = measured_.find(key);
  if (known != measured_.end()) return known->second;
  // Running layers would count in the same statistics. No synchronize(), which would settle an asynchronous step.
  pipeline_.drain();
  pipeline_.wait_buffers();
  pipeline_.weights().show();
  const c10::InferenceMode no_inference(false);
  device::Device& device = Engine::current()->worker(0).device();
  return measured_[key] = measure_layers(pipeline_.model(), step.batch, step.label, step.loss, step.trains(), device);
}

std::string StepMemory::kind_of(const StepShape& step) const {
  std::string kind = concat(step.loss ? "a loss" : "none", " ", step.trains());
  for (const at::Tensor& tensor : step.batch.tensors)
    kind += concat(" ", tensor.dim(), tensor.scalar_type(), tensor.requires_grad());
  const std::shared_ptr<const void> held = pipeline_.model().hold();
  for (const auto& state : pipeline_.model().layers) kind += concat(" ", state->layer->mode_key());
  return kind;
}

StepMemory::Sizes StepMemory::sizes_of(const StepShape& step) {
  Sizes sizes{step.label_bytes()};
  for (const at::Tensor& tensor : step.batch.tensors)
    sizes.insert(sizes.end(), tensor.sizes().begin(), tensor.sizes().end());
  return sizes;
}

runtime::PlanRequest StepMemory::request(const StepShape& step, RecomputeGrain grain) const {
  return {step.mode, step.microbatches, step.options.gradient_groups, grain};
}

simulate::StepSizes StepMemory::sizes(const StepShape& step, RecomputeGrain grain, Footprints footprints) const {
  simulate::StepSizes sizes;
  sizes.layers = runtime::layer_sizes(pipeline_.model());
  sizes.footprints = std::move(footprints);
  sizes.grain = grain;
  sizes.label_bytes = step.label_bytes();
  sizes.gradient_groups = step.options.gradient_groups;
  return sizes;
}

std::vector<schedule::Plan> StepMemory::plans(const StepShape& step, RecomputeGrain grain, int steps) const {
  return runtime::preview_plans(pipeline_.model(), step.options.route, request(step, grain), pipeline_.planner(),
                                *Engine::current(), steps);
}

runtime::MemoryLimit StepMemory::limit(int64_t budget_bytes) const {
  return {budget_bytes, runtime::device_rules(*Engine::current(), budget_bytes), correction_};
}

// Keeps plans within the budget from now on, and never above the demand of the next plan, which it returns.
DeviceMemory StepMemory::tell_planner(const StepShape& step, const Footprints& measured, RecomputeGrain grain) {
  return runtime::plan_as(pipeline_, step.options.route, request(step, grain), sizes(step, grain, measured),
                          limit(budget_.device_bytes.value_or(0)));
}

DeviceMemory StepMemory::on_device(const StepShape& step, RecomputeGrain grain, const Footprints& measured,
                                   int64_t limit_bytes) const {
  DeviceMemory found = simulate::predict_device(plans(step, grain, kSteps), sizes(step, grain, measured),
                                                runtime::device_rules(*Engine::current(), limit_bytes));
  found.work = static_cast<int64_t>(static_cast<double>(found.work) * correction_);
  return found;
}

simulate::HostMemory StepMemory::host_memory(const OptimizerMemory& optimizer) const {
  std::vector<std::vector<at::Tensor>> blocks;
  for (const runtime::BlockState& block : pipeline_.model().blocks) {
    auto& tensors = blocks.emplace_back();
    for (const memory::NamedTensor& parameter : block.block->parameters()) tensors.push_back(parameter.tensor);
  }
  simulate::HostMemory host = host_memory_of(blocks, optimizer);
  for (const runtime::BlockState& block : pipeline_.model().blocks) {
    // Gradients in fp32 cannot become the memory of the next weights.
    if (block.trainable() && block.gradient_buffers != block.block->buffers())
      host.gradients += block.gradient_layout.size_bytes;
  }
  return host;
}

simulate::HostMemory StepMemory::host_with(const OptimizerMemory& optimizer, bool gradients_in_fp32) const {
  simulate::HostMemory host = host_memory(optimizer);
  for (const runtime::BlockState& block : pipeline_.model().blocks) {
    const bool is_wide = block.gradient_buffers != block.block->buffers();
    if (!gradients_in_fp32 || is_wide) continue;
    for (const memory::NamedTensor& parameter : block.block->parameters())
      host.gradients += wider_gradient_bytes(parameter.tensor);
  }
  return host;
}

HostPrediction StepMemory::on_host(const StepShape& step, RecomputeGrain grain, const OptimizerMemory& optimizer) {
  const Footprints& measured = footprints(step);
  HostPrediction host{host_memory(optimizer)};
  const schedule::Plan plan = plans(step, grain, /*steps=*/1).front();
  host.values = simulate::waiting_on_host(plan, measured, step.microbatches);
  host.partial_sums = runtime::partial_sum_bytes(pipeline_.model(), plan, step.options.gradient_groups,
                                                 step.options.tied_grad_accumulation);
  const int64_t labels = step.microbatches * step.label_bytes();
  // The weights that the step's jobs have read, beside their successors; values that no job has to read again, and the
  // gradients of values; labels.
  if (step.options.fault_tolerant) {
    for (const runtime::BlockState& block : pipeline_.model().blocks)
      host.kept_for_failures += block.trainable() ? block.block->layout().size_bytes : 0;
    host.kept_for_failures += 2 * host.values + labels;
  }
  if (step.options.verify_every > 0 && step.trains()) {
    // The same of one job, and the results of its second run until they are compared.
    const int64_t stage =
        simulate::largest_stage_bytes(std::span(&plan, 1), sizes(step, RecomputeGrain::kStage, measured));
    host.kept_for_failures += 2 * (stage + host.values) + labels;
  }
  return host;
}

std::vector<Activations> StepMemory::activations(const StepShape& step, RecomputeGrain grain) const {
  const schedule::Plan plan = plans(step, grain, /*steps=*/1).front();
  std::vector<Activations> places(static_cast<size_t>(plan.layers), Activations::kRecompute);
  for (const schedule::Job& job : plan.jobs) {
    if (job.phase == schedule::Phase::kFused) {
      for (int l = job.layers.first; l < job.layers.last; ++l) places[static_cast<size_t>(l)] = Activations::kDevice;
    } else if (job.phase == schedule::Phase::kBackward) {
      places[static_cast<size_t>(job.layers.first)] = Activations::kHost;
    }
  }
  return places;
}

void StepMemory::compare() {
  if (!last_) return;
  const DeviceMemory& predicted = last_->device;
  const int64_t missing = peak_bytes() - predicted.total();
  if (missing > 0 && predicted.work > 0)
    correction_ *= 1 + static_cast<double>(missing) / static_cast<double>(predicted.work);
}

int64_t StepMemory::peak_bytes() const {
  const std::shared_ptr<Engine> engine = Engine::current();
  int64_t peak = 0;
  for (int i = 0; i < engine->size(); ++i) peak = std::max(peak, engine->worker(i).device().memory().peak_bytes);
  return peak;
}

namespace {

// A tensor without its values or, where they decide what a layer does (tokens, positions, masks), with them.
struct NotedTensor {
  at::Tensor values;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = false;

  static NotedTensor of(const at::Tensor& tensor) {
    const at::ScalarType dtype = tensor.scalar_type();
    const bool chooses = dtype == at::kBool || dtype == at::kShort || dtype == at::kInt || dtype == at::kLong;
    if (chooses) return {tensor.detach().clone(), {}, {}, dtype, false};
    return {{}, tensor.sizes().vec(), tensor.strides().vec(), dtype, tensor.requires_grad()};
  }

  // Its first `rows`, if it has all of the microbatch's.
  at::Tensor revived(int64_t rows, int64_t most) const {
    at::Tensor whole = values;
    if (!whole.defined()) {
      int64_t span = 1;
      for (size_t d = 0; d < sizes.size(); ++d) span += (sizes[d] - 1) * strides[d];
      if (std::ranges::count(sizes, 0) > 0) span = 0;
      whole = at::zeros({span}, dtype).as_strided(sizes, strides);
    }
    if (rows < most && whole.dim() > 0 && whole.size(0) == most) whole = whole.narrow(0, 0, rows);
    return requires_grad ? whole.detach().set_requires_grad(true) : whole;
  }
};

struct NotedValues {
  std::vector<NotedTensor> tensors;
  std::shared_ptr<const void> structure;

  static NotedValues of(const Values& values) {
    NotedValues noted{{}, values.structure};
    for (const at::Tensor& tensor : values.tensors) noted.tensors.push_back(NotedTensor::of(tensor));
    return noted;
  }

  Values revived(int64_t rows, int64_t most) const {
    Values values{{}, structure};
    for (const NotedTensor& tensor : tensors) values.tensors.push_back(tensor.revived(rows, most));
    return values;
  }
};

class Note final : public runtime::StepNote {
 public:
  Note(std::weak_ptr<StepMemory> memory, const StepShape& step)
      : memory_(std::move(memory)),
        step_(step),
        rows_(step.rows()),
        batch_(NotedValues::of(step.batch)),
        label_(NotedValues::of(step.label)) {
    step_.batch = {};
    step_.label = {};
  }

  std::string explain(int64_t cap_bytes) const override {
    const std::shared_ptr<StepMemory> memory = memory_.lock();
    if (!memory) return {};
    const c10::InferenceMode no_inference(false);
    const at::AutoGradMode grad_mode(true);
    const auto shape = [this](int64_t rows) {
      StepShape step = step_;
      step.batch = batch_.revived(rows, rows_);
      step.label = label_.revived(rows, rows_);
      return step;
    };
    try {
      return memory->explain(shape, rows_, cap_bytes);
    } catch (const std::exception& failed) {
      if (frontend().is_interrupt(std::current_exception())) throw;
      return concat(memory->describe_layers(), "\nwhat the step needs could not be predicted (",
                    frontend().said(failed),
                    "); what may help: more microbatches, shorter rows, or more memory for each device");
    }
  }

 private:
  const std::weak_ptr<StepMemory> memory_;
  StepShape step_;
  const int64_t rows_;
  const NotedValues batch_, label_;
};

}  // namespace

std::shared_ptr<const runtime::StepNote> make_step_note(std::weak_ptr<StepMemory> memory, const StepShape& step) {
  return std::make_shared<const Note>(std::move(memory), step);
}

}  // namespace roundpipe
