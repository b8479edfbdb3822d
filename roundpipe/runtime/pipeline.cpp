#include <roundpipe/runtime/pipeline.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <roundpipe/cluster/channel.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/memory/host_arena.h>
#include <roundpipe/runtime/call/loss_reduction.h>
#include <roundpipe/runtime/model/handed_in.h>
#include <roundpipe/runtime/model/out_of_memory.h>
#include <roundpipe/runtime/pipeline_node.h>
#include <roundpipe/runtime/step/update_thread.h>

namespace roundpipe::runtime {

using device::EventPtr;
using memory::GradientBlockPtr;
using schedule::Plan;
using schedule::PlanMode;

Pipeline::Pipeline(std::string name, std::vector<std::unique_ptr<Layer>> layers, bool pinned,
                   const Pipeline* in_place_of)
    : model_(std::make_shared<ModelState>(std::move(name), std::move(layers), pinned,
                                          in_place_of != nullptr ? in_place_of->model_.get() : nullptr)),
      gradients_(*model_),
      weights_(model_),
      planner_(*model_),
      random_seed_(at::detail::getDefaultCPUGenerator().current_seed()) {
  require_own_process();
}

Pipeline::~Pipeline() {
  if (model_->gradient_room) model_->gradient_room->open();
  active_.clear();
  last_call_.reset();
  gradient_call_.reset();
  memory::HostArena::trim_values();
}

namespace {

// Whether a layer may draw from a generator from which the caller's thread may draw, too.
bool may_draw_on_cards(const Call& call, Engine& engine) {
  if (engine.device_type() == c10::kCPU || !call.options.preserve_rng_state) return false;
  if (call.loss && call.model->loss_shared_draws.possible(/*with_backward=*/true)) return true;
  bool backward = call.requires_grad && call.input_gradients;
  for (size_t l = 0; l < call.model->layers.size(); ++l) {
    const std::vector<char>& trainable = call.trainable[l];
    backward |= call.requires_grad && std::find(trainable.begin(), trainable.end(), 1) != trainable.end();
    if (call.habits[l]->shared_draws.possible(backward)) return true;
  }
  return false;
}

}  // namespace

CallPtr Pipeline::begin_call(RunOptions options, CallTerms terms, Engine& engine) {
  static std::atomic<uint64_t> next_id{1};
  raise_pending();
  std::vector<LayerHabitsPtr> habits = model_->habits_of_now();
  weights_.adopt_replaced();
  auto call = std::make_shared<Call>(model_, std::move(options), std::move(terms), next_id++, calls_, random_seed_);
  call->habits = std::move(habits);
  call->thread_state.emplace();
  call->autocast = AutocastState::capture(engine.device_type());
  call->trainable = model_->trainable();
  const auto every = static_cast<uint64_t>(call->options.verify_every);
  call->verified = every > 0 && call->requires_grad && ++training_calls_ % every == 0;
  for (const BlockState& block : model_->blocks) call->readings.push_back(block.block->current());
  last_call_ = call;
  recent_logs_.push_back(call->log);
  if (recent_logs_.size() > kKeptLogs) recent_logs_.pop_front();
  ++calls_;
  return call;
}

std::vector<uint32_t> Pipeline::parameter_writes() const {
  std::vector<uint32_t> writes;
  for (const BlockState& block : model_->blocks) {
    for (const memory::NamedTensor& parameter : block.block->parameters()) {
      writes.push_back(parameter.tensor.is_inference() ? 0 : parameter.tensor._version());
    }
  }
  return writes;
}

void Pipeline::wait_or_abort(const EventPtr& event, const CallPtr& call) {
  require_own_process();
  try {
    device::wait_interruptible(*event);
  } catch (...) {
    if (call->committed && !event->complete()) throw;
    call->fail(std::current_exception());
    recover_from(std::current_exception());
  }
}

void Pipeline::tell() {
  for (const std::string& notice : model_->take_notices()) warn_user(notice);
}

void Pipeline::recover_from(std::exception_ptr error) {
  // Once nothing runs, each call has recorded all that it has to report.
  const std::vector<CallPtr> calls = active_;
  recover();
  std::optional<Call::Lack> lack;
  for (const CallPtr& call : calls) {
    std::optional<Call::Lack> own = call->take_lack();
    if (!lack) lack = std::move(own);
  }
  try {
    tell();
  } catch (...) {
    // If warnings are errors, the first error is still the one to throw.
    frontend().clear_error();
  }
  if (lack && is_out_of_memory(error)) error = explained(error, lack->full, lack->step);
  std::rethrow_exception(told(error, calls));
}

std::exception_ptr Pipeline::told(const std::exception_ptr& error, const std::vector<CallPtr>& calls) {
  std::string what;
  bool wrong_bits = false;
  try {
    std::rethrow_exception(error);
  } catch (const DeviceError& failure) {
    what = failure.what();
    wrong_bits = dynamic_cast<const WrongBits*>(&failure) != nullptr;
  } catch (...) {
    return error;
  }
  // What a step still does with the gradients that have landed. A call that fails fails their events one after the
  // other: before all have, the threads that are drained here have nothing to do yet.
  for (const BlockState& block : model_->blocks) device::wait_unless_lost(*block.block->newest()->published);
  cluster::Channel::drain_all();
  UpdateThread::instance().drain();
  engine_->see_to_failures();
  std::string numbers;
  bool tolerant = false;
  for (const CallPtr& call : calls) {
    tolerant |= call->options.fault_tolerant;
    if (call->failed()) numbers += concat(numbers.empty() ? "" : ", ", call->index);
  }
  what += concat("; the device is out of the pool, where ", engine_->size(), " of ", engine_->pool_size(),
                 " are left, and the calls of ", model_->name, " that were under way (", numbers,
                 ") are dropped, as if they had not been made");
  if (const std::vector<int> layers = model_->take_torn_layers(); !layers.empty()) {
    std::string list;
    for (const int layer : layers) list += concat(list.empty() ? "" : ", ", layer);
    what += concat("; their optimizer step had already updated layers ", list, " of ", model_->layer_count(),
                   " and leaves the others as they were: go back to a checkpoint");
  } else {
    what += "; no optimizer step has used a part of their gradients, so they can be made again";
  }
  if (wrong_bits) {
    what +=
        "; what it computed in earlier steps may be wrong as well: go back to a checkpoint from before it went wrong, "
        "and look at the device with `roundpipe selftest`";
    return std::make_exception_ptr(WrongBits(what));
  }
  if (!tolerant) what += "; with the option fault_tolerant, training goes on by itself";
  return std::make_exception_ptr(DeviceError(what));
}

template <typename Submission>
void Pipeline::submit_or_undo(const CallPtr& call, Submission submission) {
  if (std::find(active_.begin(), active_.end(), call) == active_.end()) active_.push_back(call);
  try {
    submission();
  } catch (...) {
    call->fail(std::current_exception());
    recover();
    throw;
  }
}

void Pipeline::require_parameters(const char* where) const {
  if (!model_->claim->is_lost()) return;
  throw std::invalid_argument(concat("[", where, "] another model has been made of the parameters of ", model_->name,
                                     " since, expected that one to be used; call backward and step before"));
}

void Pipeline::take_engine() {
  require_callers_thread();
  require_parameters("forward");
  const std::shared_ptr<Engine> engine = Engine::current();
  if (engine_ && engine_ != engine) {
    drain();
    engine_->wait_idle();
    model_->shells.keep(engine_->stuck_workers());
    model_->residents.keep(engine_->stuck_workers());
    planner_.forget_devices();
  }
  engine->see_to_failures();
  if (engine_ == engine && engine_changes_ != engine->changes()) {
    model_->shells.keep(engine->workers());
    model_->residents.keep(engine->workers());
    planner_.forget_devices();
  }
  engine_ = engine;
  engine_changes_ = engine->changes();
  engine->require_devices();
}

void Pipeline::note_plan(Call& call, const Plan& plan) {
  const auto alike = [](const schedule::Job& a, const schedule::Job& b) {
    return a.phase == b.phase && a.layers == b.layers && a.microbatches == b.microbatches && a.order == b.order;
  };
  // Jobs of consecutive steps may only overlap if both steps have the same order.
  const bool same = last_plan_ && std::ranges::equal(last_plan_->jobs, plan.jobs, alike);
  positions_ += same ? 1 : 2;
  call.position = positions_;
  last_plan_ = plan;
  if (schedule::mode_of(plan) != PlanMode::kInference) {
    last_step_plan_ = plan;
    last_step_groups_ = call.options.gradient_groups;
  }
}

Pipeline::Outputs Pipeline::forward(const std::vector<Values>& inputs, RunOptions options, CallTerms terms) {
  take_engine();
  const std::shared_ptr<Engine> engine = engine_;
  options.microbatches = static_cast<int>(inputs.size());
  options.requires_grad = options.requires_grad.value_or(at::GradMode::is_enabled());
  std::shared_ptr<const StepNote> step = std::exchange(terms.step, nullptr);
  const CallPtr call = begin_call(std::move(options), std::move(terms), *engine);
  for (const Values& values : inputs) {
    for (const at::Tensor& tensor : values.tensors)
      call->input_gradients |= call->requires_grad && tensor.requires_grad();
  }
  const bool train = call->requires_grad &&
                     (call->input_gradients ||
                      std::any_of(call->trainable.begin(), call->trainable.end(), [](const std::vector<char>& flags) {
                        return std::find(flags.begin(), flags.end(), 1) != flags.end();
                      }));
  call->keeps_caller = call->terms.keeps_caller || may_draw_on_cards(*call, *engine);
  call->keep_step(std::move(step), /*until_over=*/!train);
  if (train) call->parameter_writes = parameter_writes();
  const PlanMode mode = train ? PlanMode::kTrain : PlanMode::kInference;
  Plan plan;
  submit_or_undo(call, [&] {
    plan = plan_call(*call, mode, planner_, *engine);
    note_plan(*call, plan);
    open_boundaries(*call, plan);
    for (size_t m = 0; m < inputs.size(); ++m) {
      put_inputs(*call, static_cast<int>(m), inputs[m], /*copy=*/train, engine->wants_pinned_host_memory());
    }
    submit_jobs(call, plan, /*forward=*/true, /*backward=*/false, *engine);
  });
  Outputs outputs;
  for (int m = 0; m < call->microbatches; ++m) {
    wait_or_abort(call->values(plan.layers, m).produced, call);
    outputs.microbatches.push_back(read_outputs(*call, m));
  }
  weights_.show_complete();
  if (call->keeps_caller) wait_or_abort(call->finished(), call);
  tell();
  if (train) attach_graph(shared_from_this(), call, plan, inputs, outputs.microbatches);
  return outputs;
}

Values Pipeline::read_outputs(Call& call, int microbatch) const {
  BoundaryValues& boundary = call.values(model_->layer_count(), microbatch);
  Values outputs;
  outputs.structure = boundary.structure;
  const at::NoGradGuard no_grad;
  for (const memory::HostValuePtr& value : boundary.tensors) {
    const at::AutoDispatchBelowADInplaceOrView below;
    // Values that other boundaries still read must not be changed by way of the output.
    const at::Tensor own = value.use_count() > 1 ? memory::copy_alike(value->data) : value->data.alias();
    outputs.tensors.push_back(memory::restore_broadcast(*value, own));
  }
  return outputs;
}

namespace {

[[noreturn]] void refuse_at_once(const char* where, const char* why) {
  throw std::invalid_argument(concat("[", where, "] ", why,
                                     ", and the optimizer's gradients are used at once, expected a step after each "
                                     "forward_backward; make the optimizer without that option to keep gradients"));
}

}  // namespace

std::shared_ptr<Pipeline::Submitted> Pipeline::submit(const std::vector<Values>& inputs,
                                                      const std::vector<Values>& labels, std::shared_ptr<Loss> loss,
                                                      bool keep_outputs, RunOptions options, CallTerms terms) {
  take_engine();
  const std::shared_ptr<Engine> engine = engine_;
  options.microbatches = static_cast<int>(inputs.size());
  options.requires_grad = true;
  std::shared_ptr<const StepNote> step = std::exchange(terms.step, nullptr);
  terms.refuses_nan_early &= !model_->loss_scales->any();
  // Before the call gets its number, so that an error leaves no gap in the random states.
  raise_pending();
  gradients_.import();
  if (model_->gradient_room && gradients_.any())
    refuse_at_once("forward_backward", "the gradients of the call before are still here");
  const CallPtr before = last_call_;
  const CallPtr call = begin_call(std::move(options), std::move(terms), *engine);
  call->loss = std::move(loss);
  call->keep_step(std::move(step), /*until_over=*/true);
  call->keep_outputs = keep_outputs;
  call->losses.resize(inputs.size());
  call->loss_scales = LossScale::reserve(model_->loss_scales);
  for (size_t m = 0; m < inputs.size(); ++m) call->loss_ready.push_back(call->new_event());
  for (const Values& values : inputs) {
    for (const at::Tensor& tensor : values.tensors) call->input_gradients |= tensor.requires_grad();
  }
  call->keeps_caller = call->terms.keeps_caller || may_draw_on_cards(*call, *engine);
  if (model_->gradient_room && (call->keeps_caller || call->input_gradients))
    refuse_at_once("forward_backward", "this call ends with its backward, before a step can begin");
  submit_or_undo(call, [&] {
    const bool pinned = engine->wants_pinned_host_memory();
    call->labels = std::make_shared<const std::vector<Values>>(taken_over(labels, pinned));
    if (before != nullptr && before->requires_grad) planner_.note_submission(engine->fused_waits(*before));
    const Plan plan = plan_call(*call, PlanMode::kFused, planner_, *engine);
    note_plan(*call, plan);
    open_boundaries(*call, plan);
    for (size_t m = 0; m < inputs.size(); ++m) {
      put_inputs(*call, static_cast<int>(m), inputs[m], /*copy=*/true, pinned);
    }
    open_gradients(*call, plan);
    if (model_->gradient_room) gradient_call_ = call;
    open_loss_turns(*call, plan);
    submit_jobs(call, plan, /*forward=*/true, /*backward=*/true, *engine);
  });
  auto submitted = std::make_shared<Submitted>();
  submitted->call = call;
  submitted->log = call->log;
  if (call->input_gradients) submitted->inputs = inputs;
  if (call->keeps_caller) wait_or_abort(call->finished(), call);
  return submitted;
}

void Pipeline::check_losses(const CallPtr& call) {
  if (!call->terms.refuses_nan || model_->loss_scales->any()) return;
  for (size_t m = 0; m < call->losses.size(); ++m) {
    for (const at::Tensor& loss : call->losses[m]) {
      if (!loss.isnan().any().item<bool>()) continue;
      const Error error(nan_loss(concat(" of microbatch ", m)));
      call->fail(std::make_exception_ptr(error));
      raise_pending();
      throw error;  // the call is over, and its gradients are in a step
    }
  }
}

Pipeline::TrainResult Pipeline::finish(Submitted& submitted) {
  require_engine();
  require_callers_thread();
  if (submitted.finished)
    throw std::invalid_argument("[submit] the losses have been taken already, expected one call for each batch");
  submitted.finished = true;
  const CallPtr call = std::move(submitted.call);
  const std::vector<Values> inputs = std::move(submitted.inputs);
  TrainResult result;
  for (int m = 0; m < call->microbatches; ++m) {
    wait_or_abort(call->loss_ready[static_cast<size_t>(m)], call);
    if (!call->keep_outputs) continue;
    wait_or_abort(call->values(model_->layer_count(), m).produced, call);
    result.outputs.push_back(read_outputs(*call, m));
  }
  check_losses(call);
  weights_.show_complete();
  if (call->input_gradients) {
    wait_or_abort(call->finished(), call);
    // One backward for all microbatches: a graph that they share, such as another model's, can be run backward only
    // once.
    std::vector<at::Tensor> roots;
    std::vector<at::Tensor> gradients;
    for (int m = 0; m < call->microbatches; ++m) {
      const std::vector<at::Tensor>& arrived = call->gradients(0, m).tensors;
      for (size_t i = 0; i < arrived.size(); ++i) {
        if (!arrived[i].defined()) continue;
        roots.push_back(inputs[static_cast<size_t>(m)].tensors[i]);
        gradients.push_back(arrived[i]);
      }
    }
    if (!roots.empty()) torch::autograd::backward(roots, gradients);
  }
  {
    const at::NoGradGuard no_grad;
    // Copies: the caller may keep them for long, and one of them would keep the memory that many share.
    for (const std::vector<at::Tensor>& losses : call->losses) {
      result.losses.emplace_back();
      for (const at::Tensor& loss : losses) result.losses.back().push_back(loss.clone());
    }
  }
  call->loss.reset();
  call->labels.reset();
  tell();
  return result;
}

std::vector<std::vector<at::Tensor>> Pipeline::backward(const CallPtr& call, const Plan& plan,
                                                        std::vector<std::vector<at::Tensor>> gradients,
                                                        bool keep_graph) {
  require_engine();
  require_callers_thread();
  require_parameters("backward");
  if (model_->gradient_room) refuse_at_once("backward", "this backward ends before a step can begin");
  // An earlier backward of the same graph still uses the state that the next one sets up.
  wait_or_abort(call->finished(), call);
  raise_pending();
  if (const std::exception_ptr error = call->error()) std::rethrow_exception(error);
  gradients_.import();
  for (size_t b = 0; b < model_->blocks.size(); ++b) {
    if (call->readings[b]->retired) {
      throw std::invalid_argument(
          "[backward] the weights have changed since this forward: a step was published in between; call backward "
          "before the next step");
    }
  }
  if (call->parameter_writes != parameter_writes()) {
    throw std::invalid_argument(
        "[backward] parameters have been changed in place since this forward, so the recomputation would not repeat "
        "it; call backward before the optimizer's step, or run the forward again");
  }
  call->keep_values = keep_graph;
  const std::shared_ptr<Engine> engine = engine_;
  // Attempts that have been abandoned may still use what is set up anew here.
  if (call->options.fault_tolerant && engine->changes() > 0) engine->wait_idle();
  for (int m = 0; m < call->microbatches; ++m) {
    for (int boundary = 0; boundary <= plan.layers; ++boundary) {
      EventPtr& produced = call->gradients(boundary, m).produced;
      if (produced && produced->complete()) produced = call->new_event();
    }
    BoundaryGradients& arrived = call->gradients(plan.layers, m);
    const at::NoGradGuard no_grad;
    arrived.tensors.clear();
    for (const at::Tensor& gradient : gradients[static_cast<size_t>(m)]) {
      arrived.tensors.push_back(gradient.defined() ? taken_over_gradient(gradient, engine->wants_pinned_host_memory())
                                                   : gradient);
    }
    if (arrived.produced) arrived.produced->fire();
    if (keep_graph) {
      for (const schedule::Job& job : plan.jobs) {
        if (job.phase == schedule::Phase::kBackward && job.microbatches.contains(m)) {
          ++call->values(job.layers.first, m).readers;
        }
      }
    }
  }
  submit_or_undo(call, [&] {
    open_gradients(*call, plan);
    // Behind everything submitted since the forward: gradients are summed in the order of submission.
    call->position = ++positions_;
    submit_jobs(call, plan, /*forward=*/false, /*backward=*/true, *engine);
  });
  std::vector<std::vector<at::Tensor>> input_gradients;
  if (call->input_gradients) {
    for (int m = 0; m < call->microbatches; ++m) {
      wait_or_abort(call->gradients(0, m).produced, call);
      input_gradients.push_back(call->gradients(0, m).tensors);
    }
  }
  if (call->keeps_caller) wait_or_abort(call->finished(), call);
  tell();
  return input_gradients;
}

void Pipeline::finish_backward(const CallPtr& call) {
  wait_or_abort(call->finished(), call);
  if (!gradients_.shows_at_once()) return raise_pending();
  drain();  // also of other calls in the same graph, whose backwards are submitted as well
  expose();
}

std::optional<double> Pipeline::busy_share() {
  raise_pending();
  return planner_.busy_share(Engine::current()->size());
}

void Pipeline::raise_pending() {
  require_own_process();
  std::exception_ptr error;
  for (const CallPtr& call : active_) {
    if (!error) error = call->error();
  }
  if (error) recover_from(error);
  std::erase_if(active_, [&](const CallPtr& call) {
    if (!call->finished()->complete() || call->failed()) return false;
    planner_.observe(*call->log);
    return true;
  });
  tell();
}

void Pipeline::wait_losses() {
  for (const CallPtr& call : std::vector<CallPtr>(active_)) {
    for (const EventPtr& ready : call->loss_ready) wait_or_abort(ready, call);
  }
}

void Pipeline::drain() {
  require_own_process();
  require_callers_thread();
  for (const CallPtr& call : std::vector<CallPtr>(active_)) wait_or_abort(call->finished(), call);
  raise_pending();
}

namespace {

// Restores the user's buffers to their values before the call. REQUIRES: nothing of the call is running.
void put_buffers_back(const Call& call) {
  const at::NoGradGuard no_grad;
  for (int l = 0; l < call.model->layer_count(); ++l) {
    const LayerState& layer = *call.model->layers[static_cast<size_t>(l)];
    if (layer.buffers.empty()) continue;
    std::optional<Call::BufferSnapshot> before;
    for (int m = 0; m < call.microbatches && !before; ++m) before = call.snapshot(l, m);
    // A snapshot that did not reach the host precedes any write to the buffers, so they are unchanged.
    if (!before || !before->produced->complete() || before->produced->error()) continue;
    for (size_t i = 0; i < layer.buffers.size(); ++i) {
      const memory::HostValue& value = *before->tensors[i];
      layer.buffers[i].tensor.detach().copy_(memory::restore_broadcast(value, value.data));
    }
  }
}

}  // namespace

void Pipeline::recover() {
  for (const CallPtr& call : active_) device::wait_unless_lost(*call->finished());
  bool newest = true;
  for (auto call = active_.rbegin(); call != active_.rend(); ++call) {
    if (!(*call)->failed()) {
      newest = false;
      continue;
    }
    // As if the call had not been made: its number is free again, and buffers are restored, unless a good call has used
    // them since.
    --calls_;
    (*call)->loss.reset();  // it may refer back to an owner of this
    if (newest) put_buffers_back(**call);
    for (size_t b = 0; b < (*call)->results.size(); ++b) {
      // If a step has already taken the gradients, dropping them is up to the step.
      if ((*call)->results[b] && model_->gradients[b] == (*call)->results[b]) {
        model_->gradients[b] = (*call)->bases[b];
      }
    }
  }
  for (const auto& layer : model_->layers) {
    if (!layer->buffers_current) continue;
    // A call that fails still fails its events, one after the other, when its jobs are over.
    device::wait_unless_lost(*layer->buffers_current);
    if (layer->buffers_current->error()) layer->buffers_current.reset();
  }
  if (gradient_call_ && gradient_call_->failed()) gradient_call_.reset();
  active_.clear();
}

void Pipeline::wait_buffers() const {
  for (const auto& layer : model_->layers) {
    if (!layer->buffers.empty() && layer->buffers_current) device::wait_interruptible(*layer->buffers_current);
  }
}

std::vector<GradientBlockPtr> Pipeline::take_gradients() {
  require_parameters("step");
  raise_pending();
  gradient_call_.reset();
  return gradients_.take();
}

CallPtr Pipeline::call_of_gradients() const {
  if (!gradient_call_) return nullptr;
  const auto& made = gradient_call_->results;
  const auto is_here = [&](const GradientBlockPtr& gradient) {
    return gradient && std::ranges::find(made, gradient) != made.end();
  };
  return std::ranges::any_of(model_->gradients, is_here) ? gradient_call_ : nullptr;
}

void Pipeline::undo(const Call& call) {
  calls_ = call.index;
  put_buffers_back(call);
}

std::unique_ptr<StepTicket> Pipeline::begin_step() {
  return std::make_unique<StepTicket>(model_, take_gradients(), weights_.optimizer_parameters());
}

void Pipeline::keep_gradients_in_fp32() {
  drain();
  gradients_.drop();
  for (BlockState& block : model_->blocks) block.keep_gradients_in_fp32();
}

void Pipeline::bound_gradients(bool is_bounded) {
  if (!is_bounded && !model_->gradient_room) return;
  drain();
  model_->bound_gradients(is_bounded);
}

void Pipeline::expose() {
  if (model_->claim->is_lost()) return;
  weights_.adopt_replaced();
  for (const BlockState& block : model_->blocks) block.block->repoint();
  gradients_.show();
}

void Pipeline::commit_calls() {
  for (const CallPtr& call : active_) call->committed = true;
}

std::vector<ExecutionRecord> Pipeline::last_records() const {
  return last_call_ ? last_call_->records() : std::vector<ExecutionRecord>{};
}

}  // namespace roundpipe::runtime
