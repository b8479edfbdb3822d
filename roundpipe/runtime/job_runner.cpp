#include <roundpipe/runtime/job_runner.h>

#include <algorithm>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/error.h>
#include <roundpipe/runtime/out_of_memory.h>

namespace roundpipe::runtime {

using device::EventPtr;
using schedule::Phase;
using schedule::Range;
using transfer::Piece;
using transfer::Priority;

JobRunner::JobRunner(int index, device::Device& device, transfer::LinkScheduler& upload,
                     transfer::LinkScheduler& download, Shells& shells, Staging::Admit admit,
                     Staging::MakeRoom make_room, std::function<void(int)> stage_next)
    : index_(index),
      device_(device),
      outbox_(device, download),
      staging_(device, upload, std::move(admit), std::move(make_room)),
      layers_(device, upload, outbox_, shells),
      sums_(device, upload, staging_, outbox_, layers_),
      microbatches_(device, staging_, outbox_, sums_, layers_),
      stage_next_(std::move(stage_next)) {}

void JobRunner::run(JobRun& run) {
  staging_.arrive(run.uploaded);
  struct Binding {
    JobRunner& runner;
    JobRun& run;
    ~Binding() {
      runner.sums_.drop(run);
      runner.layers_.unbind();
    }
  } const binding{*this, run};
  layers_.bind(run);
  if (run.job.phase != Phase::kForward) sums_.begin(run);
  const Range microbatches = run.job.microbatches;
  for (int microbatch = microbatches.first; microbatch < microbatches.last; ++microbatch) {
    for (int ahead = microbatch; ahead < std::min(microbatch + kStaged, microbatches.last); ++ahead) {
      staging_.stage(run, ahead);
    }
    if (const int left = microbatch + kStaged - microbatches.last; left > 0) stage_next_(left);
    if (const std::exception_ptr error = run.call->error()) std::rethrow_exception(error);
    staging_.arrive(run.staged.at(microbatch).inputs->uploaded);
    // As between jobs: what the microbatch before sends is gone before this one takes memory.
    if (device_.copies_on_compute_cores()) wait_sent(run);
    const double start_ms = now_ms();
    run_microbatch(run, microbatch);
    run.staged.erase(microbatch);
    limit_run_ahead(run, microbatch, start_ms);
  }
  if (run.job.phase != Phase::kForward) sums_.send(run);
  hand_on_buffers(run);
}

void JobRunner::wait_sent(JobRun& run) {
  for (const EventPtr& sent : run.outgoing) sent->wait_complete();
  run.outgoing.clear();
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
    const std::exception_ptr error = out_of_memory_in([&] { microbatches_.run(run, microbatch, frugality); });
    if (!error) return;
    if (!prepare_again(run, microbatch, frugality)) std::rethrow_exception(error);
  }
}

bool JobRunner::prepare_again(JobRun& run, int microbatch, Frugality& frugality) {
  const Range stage = run.job.layers;
  const bool trains = run.job.phase != Phase::kForward;
  if (!sums_.can_run_again(run)) return false;
  for (int l = stage.first; l < stage.last; ++l) {
    const LayerState& layer = run.layer(l);
    if (layer.buffers.empty() || layer.writes_buffers.load() != Learned::kYes) continue;
    // Nobody keeps what a later microbatch of an inference found there.
    if (!run.call->options.requires_grad && microbatch != run.job.microbatches.first) return false;
    if (run.job.phase != Phase::kBackward) layers_.restore_buffers(run, l, microbatch);
  }
  if (!staging_.make_room()) {
    if (frugality == Frugality::kRows) return false;
    const bool by_layer = trains && frugality == Frugality::kStage && stage.size() > 1;
    frugality = by_layer ? Frugality::kLayer : Frugality::kRows;
    for (int l = stage.first; l < stage.last; ++l) run.layer(l).frugality.store(frugality);
    run.call->model->ran_out_of_memory(
        concat("[", device_.name(), "] there was not enough memory for the ", schedule::phase_name(run.job.phase),
               " of layers ", stage.first, " to ", stage.last - 1, "; going on ",
               by_layer ? "layer by layer" : "with some rows of a microbatch at a time",
               ", which takes longer; use more microbatches or shorter rows, or raise the memory cap"));
  }
  staging_.stage_again(run, microbatch);
  return true;
}

void JobRunner::hand_on_buffers(JobRun& run) {
  for (size_t i = 0; i < run.buffers_after.size(); ++i) {
    const EventPtr after = run.buffers_after[i];
    if (!after) continue;
    LayerState& state = run.layer(run.job.layers.first + static_cast<int>(i));
    if (state.writes_buffers.load() != Learned::kYes) {
      after->fire();
      continue;
    }
    const LayerShell& layer = *layers_.shell(run, run.job.layers.first + static_cast<int>(i)).layer;
    std::vector<Piece> pieces;
    for (size_t b = 0; b < layer.buffers.size(); ++b) {
      pieces.push_back({state.buffers[b].tensor.detach(), layer.buffers[b].detach()});
    }
    outbox_.send(run, Priority::kActivation, [pieces] { return pieces; }, after);
  }
}

void JobRunner::limit_run_ahead(JobRun& run, int microbatch, double start_ms) {
  EventPtr done = run.call->new_event();
  done->then([call = run.call, job = run.job, microbatch, start_ms, device = index_, event = done.get(),
              recomputed_ms = microbatches_.recomputed_ms(), waited_ms = microbatches_.waited_ms()] {
    if (event->error()) return;
    call->record({job.phase, job.layers, microbatch, device, start_ms, event->time_ms(), recomputed_ms, waited_ms});
  });
  device_.compute().signal(done);
  launched_.push_back(std::move(done));
  // On an accelerator the host would otherwise queue the whole job and take all its memory at once.
  constexpr size_t kLaunched = 2;
  while (launched_.size() > kLaunched) {
    // Only a matter of pace: the error of an earlier call must not end this one.
    launched_.front()->wait_complete();
    launched_.pop_front();
  }
}

}  // namespace roundpipe::runtime
