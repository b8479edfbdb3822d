#include <roundpipe/runtime/worker/job_runner.h>

#include <algorithm>

#include <roundpipe/core/error.h>
#include <roundpipe/core/memory_rules.h>
#include <roundpipe/runtime/model/out_of_memory.h>
#include <roundpipe/torch_compat/profiler_range.h>

namespace roundpipe::runtime {

using device::EventPtr;
using Moving = DeviceRoom::Moving;
using schedule::Phase;
using schedule::Range;

JobRunner::JobRunner(int index, DeviceRoom& room, Outbox& outbox, LayerRunner& layers, Watch& watch)
    : index_(index),
      device_(room.device()),
      room_(room),
      outbox_(outbox),
      layers_(layers),
      watch_(watch),
      sums_(device_, room.upload(), room, outbox, layers),
      microbatches_(device_, room, outbox, sums_, layers) {}

void JobRunner::run(JobRun& run) {
  const std::exception_ptr error = out_of_memory_in([&] { run_job(run); });
  if (!error) return;
  run.call->ran_out(full_device(run));
  std::rethrow_exception(error);
}

FullDevice JobRunner::full_device(const JobRun& run) const {
  FullDevice full;
  full.device = device_.name();
  full.limit_bytes = device_.memory_limit_bytes();
  full.model = run.call->model->name;
  full.call = run.call->index;
  const Range layers = doing_.layers;
  full.doing = layers.size() == 1
                   ? concat(doing_.what, " of layer ", layers.first, " (", run.layer(layers.first).layer->name(), ")")
                   : concat(doing_.what, " of layers ", layers.first, " to ", layers.last - 1);
  full.microbatch = microbatch_;
  full.microbatches = run.call->microbatches;
  full.tried = tried_;
  return full;
}

void JobRunner::run_job(JobRun& run) {
  tried_ = "other jobs had made room";
  room_.weights_may_move(Moving::kNow);
  microbatch_ = -1;
  doing_ = {"the weights", run.job.layers};
  room_.arrive(run.uploaded, run.layers_uploaded.front());
  room_.arrive_residents(run.shared_from_this());
  struct Binding {
    JobRunner& runner;
    JobRun& run;
    ~Binding() {
      runner.sums_.drop(run);
      runner.layers_.end();
    }
  } const binding{*this, run};
  layers_.begin(run);
  doing_.what = "the gradient sums";
  if (run.job.phase != Phase::kForward) sums_.begin(run);
  const Range microbatches = run.job.microbatches;
  for (int microbatch = microbatches.first; microbatch < microbatches.last; ++microbatch) {
    for (int ahead = microbatch; ahead < std::min(microbatch + kStagedMicrobatches, microbatches.last); ++ahead) {
      room_.stage(run, ahead);
    }
    if (const int left = microbatch + kStagedMicrobatches - microbatches.last; left > 0) room_.stage_next(left);
    if (const std::exception_ptr error = run.attempt->error()) std::rethrow_exception(error);
    microbatch_ = microbatch;
    doing_ = {"the inputs", run.job.layers};
    room_.arrive(run.staged.at(microbatch).inputs->uploaded);
    // As between jobs: results of the microbatch before leave the device before this one takes memory.
    if (device_.copies_on_compute_cores()) run.wait_sent();
    // Not events of the call, which fail with the call before the device has reached them.
    const EventPtr begun = device_.compute().mark();
    const Watch::Scope watched(watch_, run, microbatch);
    device_.begin_microbatch();
    {
      const torch_compat::ProfilerRange range([&] {
        return concat("roundpipe ", schedule::phase_name(run.job.phase), ": ", run.call->model->name, " layers ",
                      run.job.layers.first, " to ", run.job.layers.last - 1, ", microbatch ", microbatch, ", device ",
                      index_);
      });
      run_microbatch(run, microbatch);
    }
    run.staged.erase(microbatch);
    doing_ = {"the gradient sums", run.job.layers};
    if (run.job.phase != Phase::kForward) sums_.end_group(run, microbatch);
    const EventPtr done = device_.compute().mark();
    watch_.issued(done);
    record(run, microbatch, begun, done);
    limit_run_ahead(done);
  }
  microbatch_ = -1;
  doing_ = {"the gradients on their way out", run.job.layers};
  for (int l = run.job.layers.first; l < run.job.layers.last; ++l) {
    if (!layers_.shell(run, l).sink.can_retry()) run.habits(l).gradients_in_parts.store(true);
  }
  if (run.job.phase != Phase::kForward) sums_.send(run);
  hand_on_buffers(run);
}

void JobRunner::run_microbatch(JobRun& run, int microbatch) {
  Frugality frugality =
      run.call->options.recompute_grain == RecomputeGrain::kLayer ? Frugality::kLayer : Frugality::kStage;
  for (int l = run.job.layers.first; l < run.job.layers.last; ++l) {
    frugality = std::max(frugality, run.layer(l).frugality.load());
  }
  for (bool again = false;; again = true) {
    outbox_.begin_microbatch(again);
    sums_.begin_microbatch(run, again);
    // Only now does nothing of the failed run remain.
    if (again) room_.make_room();
    room_.weights_may_move(Moving::kNever);
    const std::exception_ptr error = out_of_memory_in([&] { microbatches_.run(run, microbatch, frugality); });
    room_.weights_may_move(Moving::kNow);
    if (!error) return;
    doing_ = microbatches_.doing();
    room_.weights_may_move(Moving::kLater);
    if (!prepare_again(run, microbatch, frugality)) std::rethrow_exception(error);
    room_.weights_may_move(Moving::kNow);
  }
}

bool JobRunner::prepare_again(JobRun& run, int microbatch, Frugality& frugality) {
  const Range stage = run.job.layers;
  room_.arrive(run.uploaded);  // what moves the weights, or writes buffers, takes them all to be there
  if (!sums_.can_run_again(run)) {
    tried_ = "it could not run again in less memory, since a layer runs backward passes of its own";
    return false;
  }
  for (int l = stage.first; l < stage.last; ++l) {
    const LayerState& layer = run.layer(l);
    if (layer.buffers.empty() || run.habits(l).writes_buffers.load() != Learned::kYes) continue;
    // An inference keeps buffer snapshots of a job's first microbatch only.
    if (!run.call->requires_grad && microbatch != run.job.microbatches.first) {
      tried_ = "it could not run again in less memory, since it had changed buffers of which nobody keeps a copy";
      return false;
    }
    if (run.job.phase != Phase::kBackward) layers_.restore_buffers(run, l, microbatch);
  }
  if (!room_.make_room()) {
    const bool can_split = run.job.phase != Phase::kForward && stage.size() > 1;
    if (!can_split || frugality == Frugality::kLayer) {
      tried_ = "other jobs had made room, and it ran one layer at a time";
      return false;
    }
    frugality = Frugality::kLayer;
    for (int l = stage.first; l < stage.last; ++l) run.layer(l).frugality.store(frugality);
    run.call->model->notify(
        ModelState::Notice::kOutOfMemory,
        concat("[", device_.name(), "] there was not enough memory for the ", schedule::phase_name(run.job.phase),
               " of layers ", stage.first, " to ", stage.last - 1, " of ", run.call->model->name, " in call ",
               run.call->index,
               "; going on layer by layer, which takes longer; use more microbatches or shorter rows, "
               "or raise the memory cap"));
  }
  room_.stage_again(run, microbatch);
  return true;
}

void JobRunner::hand_on_buffers(JobRun& run) {
  for (size_t i = 0; i < run.buffers_after.size(); ++i) {
    const EventPtr after = run.buffers_after[i];
    const bool compared = run.attempt->only_checks() && run.job.phase != Phase::kBackward;
    if (!after && !compared) continue;
    const int l = run.job.layers.first + static_cast<int>(i);
    LayerState& state = run.layer(l);
    if (run.habits(l).writes_buffers.load() != Learned::kYes) {
      if (after) after->fire();
      continue;
    }
    const LayerShell& layer = *layers_.shell(run, l).layer;
    std::vector<at::Tensor> targets, values;
    for (size_t b = 0; b < layer.buffers.size(); ++b) {
      targets.push_back(state.buffers[b].tensor.detach());
      values.push_back(layer.buffers[b].detach());
    }
    outbox_.send_buffers(run, l, std::move(targets), values, after);
  }
}

void JobRunner::record(JobRun& run, int microbatch, const EventPtr& begun, const EventPtr& done) {
  if (run.attempt->only_checks()) return;  // no job of the plan
  run.attempt->then({done}, [call = run.call, job = run.job, microbatch, device = index_, begun, done,
                             gradient = microbatches_.gradient_wait(), weights = layers_.take_waits()] {
    ExecutionRecord record{job.phase, job.layers, microbatch, device, begun->time_ms(), done->time_ms()};
    if (gradient.recomputed) {
      record.recomputed_ms = gradient.recomputed->time_ms();
      record.waited_ms = std::max(0.0, gradient.arrived_ms - record.recomputed_ms);
    }
    for (const auto& [idle, arrived] : weights) {
      record.weights_ms += std::max(0.0, arrived->time_ms() - std::max(idle->time_ms(), begun->time_ms()));
    }
    call->record(record);
  });
}

void JobRunner::limit_run_ahead(EventPtr done) {
  launched_.push_back(std::move(done));
  // Otherwise the host would queue the whole job on an accelerator and take all of its memory at once.
  constexpr size_t kLaunched = 2;
  while (launched_.size() > kLaunched) {
    // This only limits the pace: the error of an earlier call must not end this one.
    launched_.front()->wait_complete();
    launched_.pop_front();
  }
}

}  // namespace roundpipe::runtime
