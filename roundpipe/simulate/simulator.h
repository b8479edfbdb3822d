#pragma once

#include <span>
#include <vector>

#include <roundpipe/schedule/progress.h>

namespace roundpipe::simulate {

// One microbatch of one job on its device, which is busy from start_ms to end_ms without a break.
struct TimelineEvent {
  int job = 0;  // index in Plan::jobs
  int microbatch = 0;
  int device = 0;
  int step = 0;
  schedule::Phase phase = schedule::Phase::kForward;
  double start_ms = 0;
  double end_ms = 0;
  double recompute_ms = 0;  // the part at the start that needs no gradient; 0 unless backward
};

struct Timeline {
  std::vector<TimelineEvent> events;  // by step, then dispatch order, then microbatch
  double makespan_ms = 0;
  double steady_step_ms = 0;  // see schedule::pace_ms
  double bubble = 0;          // 1 - busy / (devices * makespan)
  double steady_bubble = 0;   // the bubble of one steady step; equals `bubble` for a single step
};

struct SimulateOptions {
  int steps = 1;
  schedule::TimingRules rules;
};

// Runs `steps` repetitions of `plan`, or one step of each of `plans`, by the rules of schedule::Progress: compute times
// and hop latency. Does not model transfers of weights and gradients, bandwidths or memory.
// Throws std::invalid_argument for invalid plans, costs, cluster or options, and for sizes that do not match.
Timeline simulate(const schedule::Plan& plan, const schedule::LayerCosts& costs, const schedule::Cluster& cluster,
                  const SimulateOptions& options = {});
Timeline simulate(std::span<const schedule::Plan> plans, const schedule::LayerCosts& costs,
                  const schedule::Cluster& cluster, schedule::TimingRules rules);

// Throws std::logic_error, naming the event, unless `timeline` is a run of `plans`: each microbatch of each job runs
// once, on its device and in that device's order; a device runs one thing at a time; nothing runs before its inputs or
// before the gradients of the step whose weights it reads have landed. Shares no code with the simulator.
void check(const Timeline& timeline, std::span<const schedule::Plan> plans, schedule::TimingRules rules = {});
// Checks repetitions of one plan.
void check(const Timeline& timeline, const schedule::Plan& plan, schedule::TimingRules rules = {});

}  // namespace roundpipe::simulate
