#pragma once

#include <optional>
#include <vector>

#include <roundpipe/schedule/costs.h>
#include <roundpipe/schedule/plan.h>

namespace roundpipe::simulate {

// One microbatch of one job on its device: busy from start_ms to end_ms without a break.
struct TimelineEvent {
  int job = 0;  // index in Plan::jobs
  int microbatch = 0;
  int device = 0;
  int step = 0;
  schedule::Phase phase = schedule::Phase::kForward;
  double start_ms = 0;
  double end_ms = 0;
  double recompute_ms = 0;  // the part at the start that needs no gradient yet; 0 unless backward
};

struct Timeline {
  std::vector<TimelineEvent> events;  // by step, then dispatch order, then microbatch
  double makespan_ms = 0;
  double steady_step_ms = 0;  // from step end to step end, averaged over the second half of the steps
  double bubble = 0;          // 1 - busy / (devices * makespan)
  double steady_bubble = 0;   // the same over one steady step; equals `bubble` for a single step
};

struct SimulateOptions {
  int steps = 1;
  // Step s reads weights with the updates of steps up to s - 2 (asynchronous) or s - 1 (synchronous).
  bool asynchronous = true;
  // Overrides the cluster's hop latency.
  std::optional<double> hop_latency_ms = std::nullopt;
};

// Runs `steps` repetitions of `plan` with the given compute times and a fixed latency for values that change device.
//
// - A device runs its jobs in plan order, microbatch by microbatch, and never two at once; its speed divides times.
// - A backward microbatch first recomputes its forward, for which it waits for the stage's input but not for the
//   gradient. A fused one runs forward and backward and recomputes nothing.
// - In a train plan the loss takes no time and appears one hop after the last output; no backward job starts before
//   the last output.
// - A forward or fused job waits until the step it reads weights from (see `asynchronous`) has every gradient of the
//   job's trainable layers. Updates take no time; transfers of weights and gradients, bandwidths and memory are not
//   modelled.
// Throws std::invalid_argument for an invalid plan, costs, cluster or options, or sizes that do not fit together.
Timeline simulate(const schedule::Plan& plan, const schedule::LayerCosts& costs, const schedule::Cluster& cluster,
                  const SimulateOptions& options = {});

// Throws std::logic_error, naming the event, unless `timeline` is a run of whole steps of `plan`: each microbatch of
// each job once a step, on its device and in its device's order, nothing at the same time on one device, nothing before
// its inputs, and no weights older (asynchronous) or other (synchronous) than promised above.
void check(const Timeline& timeline, const schedule::Plan& plan, bool asynchronous = true);

}  // namespace roundpipe::simulate
