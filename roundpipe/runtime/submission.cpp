#include <roundpipe/runtime/submission.h>

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include <roundpipe/core/error.h>

namespace roundpipe::runtime {

using device::EventPtr;
using schedule::Job;
using schedule::Phase;
using schedule::Plan;
using schedule::PlanMode;
using schedule::Range;

namespace {

// The lowest layer that trains, of trained_layers(); the number of layers if none does.
int lowest_trained(const std::vector<char>& trained) {
  return static_cast<int>(std::ranges::find(trained, 1) - trained.begin());
}

int devices_of(Engine& engine) { return std::max(1, engine.size()); }

// From options.first_device on.
Plan plan_stages(schedule::Stages stages, int layers, const schedule::PlannerOptions& options, int devices) {
  const PlanMode mode = options.mode;
  const int first_backward_layer = options.first_backward_layer;
  std::vector<Range> backward;
  for (const Range& stage : stages.backward) {
    if (mode == PlanMode::kInference) break;
    const bool fused = mode == PlanMode::kFused && backward.empty();
    if (!fused && stage.last <= first_backward_layer) continue;
    const int first = fused ? stage.first : std::max(stage.first, first_backward_layer);
    backward.push_back({first, stage.last});
  }
  const int end = stages.forward.empty() ? 0 : stages.forward.back().last;
  if (mode != PlanMode::kFused && end != layers && !stages.backward.empty() && end == stages.backward.front().first) {
    throw std::invalid_argument(
        concat("[plan] the forward stages end before layer ", end, " of ", layers,
               ", expected all layers in a forward without a loss; only in a batch with a loss does the first backward "
               "stage run its own forward: add forward stages of these layers"));
  }
  stages.backward = std::move(backward);
  if (options.single_backward_layers)
    stages = schedule::to_stages(schedule::with_single_backward_layers(schedule::to_cut(stages), mode));
  return schedule::make_plan(stages, layers, devices, options);
}

// Throws unless every job that makes gradients makes those of whole groups.
void check_groups(const Plan& plan, const Call& call) {
  const schedule::GradientGroups groups = call.groups();
  const std::vector<char> trained = trained_layers(call.trainable);
  for (const Job& job : plan.jobs) {
    if (job.phase == Phase::kForward || groups.are_whole(job.microbatches)) continue;
    for (int l = job.layers.first; l < job.layers.last; ++l) {
      if (!trained[static_cast<size_t>(l)]) continue;
      throw std::invalid_argument(concat(
          "[plan] the job \"", to_string(job), "\" divides the trainable layer ", l,
          " within a group of gradients: gradient_groups is ", call.options.gradient_groups, " for ", call.microbatches,
          " microbatches, and devices share a trainable layer by whole groups; set the option gradient_groups to "
          "the number of groups that the plan was made for"));
    }
  }
}

void check_fits(const Plan& plan, const Call& call, PlanMode mode, int first_backward_layer, const Engine& engine) {
  const auto require = [](int value, int expected, const char* what) {
    if (value != expected)
      throw std::invalid_argument(concat("[plan] the plan has ", value, " ", what, ", expected ", expected,
                                         "; make one for this model, batch and pool"));
  };
  schedule::validate(plan, mode);
  require(plan.layers, call.model->layer_count(), "layers");
  require(plan.microbatches, call.microbatches, "microbatches");
  // A plan for all devices of the pool still holds after some of them have failed: the others share their jobs.
  if (plan.devices != engine.pool_size()) require(plan.devices, engine.size(), "devices");
  if (mode != PlanMode::kInference)
    require(plan.first_backward_layer, first_backward_layer, "as the first layer with a backward");
  check_groups(plan, call);
}

Plan given_plan(const Plan& plan, const PlanRequest& request) {
  return options_of(request).single_backward_layers ? schedule::with_single_backward_layers(plan) : plan;
}

// With devices in turn from where the last plan stopped.
schedule::PlannerOptions options_in_turn(const PlanRequest& request, Engine& engine) {
  schedule::PlannerOptions options = options_of(request);
  options.first_device = engine.first_device() % devices_of(engine);
  return options;
}

}  // namespace

Plan plan_call(const Call& call, PlanMode mode, ModelPlanner& planner, Engine& engine) {
  const Route& route = call.options.route;
  const bool backward = mode != PlanMode::kInference;
  PlanRequest request{mode, call.microbatches, call.options.gradient_groups, call.options.recompute_grain};
  request.trained = trained_layers(call.trainable);
  request.first_backward_layer = !backward || call.input_gradients ? 0 : lowest_trained(request.trained);
  if (const auto* stages = std::get_if<schedule::Stages>(&route)) {
    Plan plan = plan_stages(*stages, call.model->layer_count(), options_in_turn(request, engine), devices_of(engine));
    engine.advance(static_cast<int>(plan.jobs.size()));
    return plan;
  }
  if (const auto* plan = std::get_if<Plan>(&route)) {
    check_fits(*plan, call, mode, request.first_backward_layer, engine);
    return given_plan(*plan, request);
  }
  return planner.next(engine, request);
}

PlanRequest completed(const ModelState& model, PlanRequest request) {
  request.trained = trained_layers(model.trainable());
  request.first_backward_layer = request.mode == PlanMode::kInference ? 0 : lowest_trained(request.trained);
  return request;
}

std::vector<Plan> preview_plans(const ModelState& model, const Route& route, PlanRequest request,
                                const ModelPlanner& planner, Engine& engine, int steps) {
  if (const auto* plan = std::get_if<Plan>(&route))
    return std::vector<Plan>(static_cast<size_t>(steps), given_plan(*plan, request));
  request = completed(model, std::move(request));
  const auto* stages = std::get_if<schedule::Stages>(&route);
  if (stages == nullptr) return planner.preview(engine, request, steps);
  std::vector<Plan> plans;
  schedule::PlannerOptions options = options_in_turn(request, engine);
  const int devices = devices_of(engine);
  for (int step = 0; step < steps; ++step) {
    plans.push_back(plan_stages(*stages, model.layer_count(), options, devices));
    options.first_device = (options.first_device + static_cast<int>(plans.back().jobs.size())) % devices;
  }
  return plans;
}

void open_boundaries(Call& call, const Plan& plan) {
  call.saved_boundaries.assign(static_cast<size_t>(plan.layers) + 1, 0);
  const auto open_values = [&](int boundary, Range microbatches) {
    for (int m = microbatches.first; m < microbatches.last; ++m) {
      EventPtr& produced = call.values(boundary, m).produced;
      if (!produced) produced = call.new_event();
    }
  };
  const auto open_gradients_at = [&](int boundary, Range microbatches) {
    for (int m = microbatches.first; m < microbatches.last; ++m) {
      EventPtr& produced = call.gradients(boundary, m).produced;
      if (!produced) produced = call.new_event();
    }
  };
  for (const Job& job : plan.jobs) {
    const Range stage = job.layers;
    open_values(stage.first, job.microbatches);
    for (int m = job.microbatches.first; m < job.microbatches.last; ++m) ++call.values(stage.first, m).readers;
    if (job.phase == Phase::kForward) open_values(stage.last, job.microbatches);
    if (job.phase == Phase::kFused && call.keep_outputs) open_values(stage.last, job.microbatches);
    if (job.phase == Phase::kBackward) {
      call.saved_boundaries[static_cast<size_t>(stage.first)] = 1;
      open_gradients_at(stage.last, job.microbatches);
    }
    const bool wanted = stage.first > plan.first_backward_layer || (stage.first == 0 && call.input_gradients);
    if (job.phase != Phase::kForward && wanted) open_gradients_at(stage.first, job.microbatches);
  }
}

void put_inputs(Call& call, int microbatch, const Values& inputs, bool copy, bool pinned) {
  BoundaryValues& values = call.values(0, microbatch);
  values.structure = inputs.structure;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < inputs.tensors.size(); ++i) {
    const at::Tensor& tensor = inputs.tensors[i];
    const size_t same = memory::place_of(tensor, inputs.tensors);
    if (same < i) {
      values.tensors.push_back(values.tensors[same]);
      continue;
    }
    const bool requires_grad = call.requires_grad && tensor.requires_grad();
    const at::Tensor plain = tensor.detach();
    // Copied if `pinned`: an accelerator reads pageable memory only while this thread waits.
    values.tensors.push_back(copy || pinned || !plain.device().is_cpu()
                                 ? memory::copy_to_host(plain, requires_grad, pinned)
                                 : memory::refer_to_host(plain, requires_grad));
  }
  values.produced->fire();
}

namespace {

// How many sums of a block's gradients devices send.
int parts_of(const BlockState& block, const Plan& plan, const std::vector<int>& of_layers) {
  const JoinedGradients joined{block.layers.back()};
  const auto has_all = [&](const Job& job) {
    return job.phase != Phase::kForward && job.microbatches.size() == plan.microbatches &&
           joined.holds(block.layers.front(), job.layers.first, job.layers.last);
  };
  if (std::ranges::any_of(plan.jobs, has_all)) return 1;
  int parts = 0;
  for (const int layer : block.layers) parts += of_layers[static_cast<size_t>(layer)];
  return parts;
}

}  // namespace

int64_t partial_sum_bytes(const ModelState& model, const Plan& plan, int gradient_groups, TiedGradAccumulation tied) {
  const std::vector<int> parts = schedule::gradient_parts(plan, gradient_groups);
  int64_t bytes = 0;
  for (const BlockState& block : model.blocks) {
    if (!block.tied() || tied == TiedGradAccumulation::kLayer) bytes += block.sum_bytes(parts_of(block, plan, parts));
  }
  return bytes;
}

void open_gradients(Call& call, const Plan& plan) {
  ModelState& model = *call.model;
  const schedule::GradientGroups groups = call.groups();
  const std::vector<int> parts = schedule::gradient_parts(plan, call.options.gradient_groups);
  call.bases.assign(model.blocks.size(), nullptr);
  call.results.assign(model.blocks.size(), nullptr);
  call.block_sums.clear();
  call.block_sums.resize(model.blocks.size());
  call.tied_sums.clear();
  call.tied_sums.resize(model.blocks.size());
  for (size_t block = 0; block < model.blocks.size(); ++block) {
    if (!call.trains(block)) continue;
    const BlockState& state = model.blocks[block];
    auto result = std::make_shared<memory::GradientBlock>();
    result->landed = call.new_event();
    call.bases[block] = model.gradients[block];
    call.results[block] = result;
    model.gradients[block] = result;
    const memory::BlockLayout& layout = state.gradient_layout;
    const memory::GradientBlockPtr base = call.bases[block];
    const size_t sharers = state.layers.size();
    if (state.tied() && call.options.tied_grad_accumulation == TiedGradAccumulation::kMicrobatch) {
      std::vector<size_t> ends;
      for (int g = 1; g <= groups.count(); ++g) ends.push_back(static_cast<size_t>(groups.microbatches({0, g}).last));
      call.tied_sums[block] =
          std::make_unique<memory::TiedSum>(result, base, layout, state.gradient_buffers, sharers, std::move(ends));
    } else if (const int count = parts_of(state, plan, parts); count > 1) {
      if (!model.gradient_room) state.sum_buffers->keep(static_cast<size_t>(count));
      call.block_sums[block] =
          std::make_unique<BlockSum>(BlockSum::Target{result, state.tied() ? base : nullptr, layout,
                                                      state.gradient_buffers, state.sum_layout, state.sum_buffers},
                                     sharers, groups.count());
    }
  }
}

void open_loss_turns(Call& call, const Plan& plan) {
  if (!call.loss->is_open()) return;
  std::vector<const Job*> fused;
  for (const Job& job : plan.jobs) {
    if (job.phase == Phase::kFused) fused.push_back(&job);
  }
  // A device's later job waits for an earlier one of another device, never the other way round.
  std::ranges::stable_sort(fused, {}, &Job::order);
  call.loss_turns.resize(static_cast<size_t>(call.microbatches));
  for (const Job* job : fused) {
    for (int m = job->microbatches.first; m < job->microbatches.last; ++m) {
      if (!call.loss_order.empty()) call.loss_turns[static_cast<size_t>(m)] = call.new_event();
      call.loss_order.push_back(m);
    }
  }
}

namespace {

// The place in the plan of the job that is checked, if one is.
std::optional<size_t> checked_job(const Call& call, const Plan& plan) {
  if (!call.verified) return std::nullopt;
  return static_cast<size_t>(call.seed(plan.layers + 1, 0) % plan.jobs.size());
}

// A run of the same job, on another device if there is one, whose results are compared.
std::shared_ptr<JobRun> checking(const std::shared_ptr<JobRun>& run, Engine& engine) {
  const CallPtr& call = run->call;
  // The check keeps the run until it is decided.
  auto check = std::make_shared<JobCheck>(
      call, run->job, [&engine, run = std::weak_ptr(run)] { engine.dispute(std::shared_ptr(run)); });
  run->attempt->belongs_to(check, check->add_run());
  std::shared_ptr<JobRun> other = run->to_check(check);
  const auto devices = static_cast<uint64_t>(std::max(1, engine.size()));
  const uint64_t step = devices > 1 ? 1 + call->seed(run->last_layer + 1, 1) % (devices - 1) : 0;
  other->job.device = static_cast<int>((static_cast<uint64_t>(run->job.device) + step) % devices);
  return other;
}

}  // namespace

void submit_jobs(const CallPtr& call, const Plan& plan, bool forward, bool backward, Engine& engine) {
  ModelState& model = *call->model;
  std::vector<std::shared_ptr<JobRun>> runs;
  call->fingerprints.clear();  // values may have changed since the forward was submitted
  const std::optional<size_t> to_check = checked_job(*call, plan);
  for (size_t place = 0; place < plan.jobs.size(); ++place) {
    const Job& job = plan.jobs[place];
    const bool is_backward = job.phase == Phase::kBackward;
    if (is_backward ? !backward : !forward) continue;
    auto run = std::make_shared<JobRun>();
    run->call = call;
    run->job = job;
    run->attempt = std::make_shared<Attempt>(call, std::make_shared<JobResults>(), 0);
    const bool checked = to_check == place;
    if (job.phase == Phase::kFused && (call->options.fault_tolerant || checked)) run->labels = call->labels;
    if (job.phase == Phase::kFused) run->loss = call->loss;
    run->position = static_cast<double>(call->position) + job.order;
    run->last_layer = plan.layers;
    run->layout = lay_out_stage(model, job.layers.first, job.layers.last);
    run->may_reside = true;
    run->uploaded = run->attempt->new_event();
    run->weights_read = device::make_event();
    run->buffers_before.resize(static_cast<size_t>(job.layers.size()));
    run->buffers_after.resize(run->buffers_before.size());
    for (int l = job.layers.first; l < job.layers.last; ++l) {
      LayerState& layer = *model.layers[static_cast<size_t>(l)];
      const size_t place = run->place(l);
      for (const size_t block : layer.blocks) {
        model.blocks[block].block->add_reader(call->readings[block], run->weights_read);
      }
      const Learned writes_buffers = call->habits[static_cast<size_t>(l)]->writes_buffers.load();
      // A backward job does not write buffers, but must not read them while a forward may be writing them.
      if (!layer.buffers.empty() && (!is_backward || writes_buffers == Learned::kUnknown)) {
        run->buffers_before[place] = layer.buffers_current;
        if (!is_backward && writes_buffers != Learned::kNo) {
          run->buffers_after[place] = call->new_event();
          layer.buffers_current = run->buffers_after[place];
        }
      }
    }
    runs.push_back(run);
    // Next to it in every order: jobs of the same position may wait for the buffers that the two hand on together.
    if (checked) runs.push_back(checking(run, engine));
  }
  call->add_jobs(static_cast<int>(runs.size()));
  try {
    engine.submit(runs);
  } catch (...) {
    call->fail(std::current_exception());
    for (const auto& run : runs) {
      run->weights_read->fire();
      call->job_over();
    }
    throw;
  }
}

}  // namespace roundpipe::runtime
