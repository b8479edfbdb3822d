#pragma once

#include <span>
#include <vector>

#include <roundpipe/schedule/progress.h>

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
  double recompute_ms =
      0;  // the part at the start that needs no gradient yet; 0 unless backward (or an early fused forward)
};

struct Timeline {
  std::vector<TimelineEvent> events;  // by step, then dispatch order, then microbatch
  double makespan_ms = 0;
  double steady_step_ms = 0;  // see schedule::pace_ms
  double bubble = 0;          // 1 - busy / (devices * makespan)
  double steady_bubble = 0;   // the same over one steady step; equals `bubble` for a single step
};

struct SimulateOptions {
  int steps = 1;
  schedule::TimingRules rules;
};

// Runs `steps` repetitions of `plan`, or the given plans one after the other, by the rules of schedule::Progress:
// compute times and hop latency; transfers of weights and gradients, bandwidths and memory are not modelled.
// Throws std::invalid_argument for invalid plans, costs, cluster or options, or sizes that do not fit together.
Timeline simulate(const schedule::Plan& plan, const schedule::LayerCosts& costs, const schedule::Cluster& cluster,
                  const SimulateOptions& options = {});
Timeline simulate(std::span<const schedule::Plan> plans, const schedule::LayerCosts& costs,
                  const schedule::Cluster& cluster, schedule::TimingRules rules);

// Throws std::logic_error, naming the event, unless `timeline` is a run of `plans`: each microbatch of each job once,
// on its device and in its device's order, nothing at the same time on one device, nothing before its inputs, and no
// weights older (asynchronous) or other (synchronous) than promised. Shares no code with the simulator.
void check(const Timeline& timeline, std::span<const schedule::Plan> plans, schedule::TimingRules rules = {});
// The same for repetitions of one plan.
void check(const Timeline& timeline, const schedule::Plan& plan, schedule::TimingRules rules = {});

}  // namespace roundpipe::simulate
