#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include <roundpipe/schedule/costs.h>
#include <roundpipe/schedule/plan.h>

namespace roundpipe::schedule {

// Which dependencies a run of a plan has, besides its devices.
struct TimingRules {
  // Step s reads weights that contain the updates of steps up to s - 2 (asynchronous) or s - 1 (synchronous).
  bool asynchronous = true;
  // Every value takes the way over the host, so even a value that stays on its device pays the hop.
  bool hop_on_same_device = false;
  // A backward recomputes only after its gradient has arrived, as in the schedules of other systems.
  bool late_recompute = false;
};

// The time of one microbatch of a visit on a device of speed 1.
double visit_ms(Phase phase, Range layers, const CostSums& sums);
// The time of a step on one device of speed 1.
double work_ms(const Plan& plan, const CostSums& sums);

// The clock of a pipeline. It computes, job by job, when each microbatch runs, from compute times and a fixed latency
// for values that change device. Updates take no time, and memory is not modelled.
//
// - If the cluster has bandwidths, weights go up one job after another, from when the job before is next, and gradients
//   go down one job after another. A link has its share of the host's bandwidth. Every value takes the way over the
//   host, for as long as the largest one takes on idle links. Else weights and gradients take no time. Frozen weights
//   that a device keeps (KeptWeights) do not go up again.
// - A device runs its jobs in the order given, microbatch by microbatch. Its speed divides times.
// - A backward microbatch first recomputes its forward. The recompute waits for the stage's input, not for the
//   gradient. A fused microbatch runs forward and backward and recomputes nothing.
// - In a train plan, the loss takes no time, and no backward job starts before the last output.
// - A forward or fused job waits until every gradient of its trainable layers has landed in the step whose weights it
//   reads.
class Progress {
 public:
  // One microbatch of one job: the device is busy from start_ms to end_ms and recomputes for the first recompute_ms.
  struct Visit {
    int microbatch;
    double start_ms;
    double end_ms;
    double recompute_ms;
  };

  // `shape` gives the sizes and the stages of every step that will run. Its devices are not read.
  Progress(const Plan& shape, const LayerCosts& costs, const Cluster& cluster, TimingRules rules);

  // Runs `job` of `step` on `device`, calls `visit` for each microbatch, and returns when the job ends, or when its
  // gradients have landed if the step is synchronous.
  // REQUIRES: jobs come by ascending step + order, from at most two steps at a time.
  template <typename Visitor>
  double run(const Job& job, int device, int step, Visitor visit) {
    return pass(job, device, step, visit, /*keep=*/true);
  }

  // Returns when the job would end on `device`, without running it.
  double peek(const Job& job, int device, int step) {
    return pass(job, device, step, [](const Visit&) {}, /*keep=*/false);
  }

  double free_ms(int device) const { return free_ms_[static_cast<std::size_t>(device)]; }
  const KeptWeights& kept() const { return kept_; }
  const CostSums& sums() const { return sums_; }

 private:
  // The results of one step so far. Tables are [boundary][microbatch]; boundary l lies below layer l.
  struct Step {
    int number = -1;
    double outputs_ms = 0;  // when the last output was ready
    std::vector<double> value_ms, gradient_ms;
    std::vector<int> value_device, gradient_device;
    std::vector<double> landed_ms;  // [layer]
  };
  static constexpr int kLive = 4;

  Step& step_at(int number);
  std::size_t at(int boundary, int microbatch) const {
    return static_cast<std::size_t>(boundary) * microbatches_ + static_cast<std::size_t>(microbatch);
  }
  // What is on the way to one device and from it.
  struct Links {
    double arrived_ms = 0;  // the weights of the last job
    double since_ms = 0;    // from when the last job was the device's next one
    double landed_ms = 0;   // the gradients of the jobs so far
  };

  double hop_ms(int from, int to) const { return from == to && !rules_.hop_on_same_device ? 0 : hop_ms_; }

  template <typename Visitor>
  double pass(const Job& job, int device, int step, Visitor visit, bool keep);

  const CostSums sums_;
  KeptWeights kept_;
  const TimingRules rules_;
  const PlanMode mode_;
  const int layers_;
  const std::size_t microbatches_;
  const int first_backward_layer_;
  const double hop_ms_;
  const double up_ms_per_byte_, down_ms_per_byte_;
  std::vector<double> speed_;
  std::vector<char> read_boundary_;  // whether some job starts there
  std::vector<double> free_ms_;
  std::vector<Links> links_;
  std::array<Step, kLive> steps_;
};

template <typename Visitor>
double Progress::pass(const Job& job, int device, int number, Visitor visit, bool keep) {
  const double speed = speed_[static_cast<std::size_t>(device)];
  const bool backward = job.phase == Phase::kBackward;
  const double forward_ms = (backward ? sums_.recompute_ms(job.layers) : sums_.forward_ms(job.layers)) / speed;
  const double backward_ms = job.phase == Phase::kForward ? 0 : sums_.backward_ms(job.layers) / speed;
  Step& now = step_at(number);
  const double free_ms = free_ms_[static_cast<std::size_t>(device)];
  Links& links = links_[static_cast<std::size_t>(device)];
  double clock = free_ms, published_ms = 0;
  const int staleness = rules_.asynchronous ? 2 : 1;
  if (!backward && number >= staleness) {
    const Step& before = step_at(number - staleness);
    for (int layer = std::max(job.layers.first, first_backward_layer_); layer < job.layers.last; ++layer)
      published_ms = std::max(published_ms, before.landed_ms[static_cast<std::size_t>(layer)]);
  }
  const std::int64_t weight_bytes = sums_.weight_bytes(job.layers) - kept_.kept_bytes(job.layers, device);
  const double arrived_ms =
      std::max({links.arrived_ms, links.since_ms, published_ms}) + up_ms_per_byte_ * static_cast<double>(weight_bytes);
  clock = std::max({clock, published_ms, up_ms_per_byte_ > 0 ? arrived_ms : 0});
  const bool outside_loss = backward && mode_ == PlanMode::kTrain;
  if (outside_loss) clock = std::max(clock, now.outputs_ms);
  for (int m = job.microbatches.first; m < job.microbatches.last; ++m) {
    double input_ms = 0, gradient_ms = 0;
    if (job.layers.first > 0) {
      const std::size_t from = at(job.layers.first, m);
      input_ms = now.value_ms[from] + hop_ms(now.value_device[from], device);
    }
    if (backward && job.layers.last < layers_) {
      const std::size_t from = at(job.layers.last, m);
      gradient_ms = now.gradient_ms[from] + hop_ms(now.gradient_device[from], device);
    } else if (outside_loss) {
      gradient_ms = now.outputs_ms + hop_ms_;
    }
    // Recompute as late as the gradient allows: the visit has no gap inside, and nothing ends later.
    const double start_ms = std::max({clock, input_ms, gradient_ms - (rules_.late_recompute ? 0 : forward_ms)});
    clock = start_ms + forward_ms + backward_ms;
    if (!keep) continue;
    visit(Visit{m, start_ms, clock, backward ? forward_ms : 0});
    if (!backward) {
      for (int boundary = job.layers.first + 1; boundary <= job.layers.last; ++boundary) {
        if (!read_boundary_[static_cast<std::size_t>(boundary)]) continue;
        now.value_ms[at(boundary, m)] = clock;
        now.value_device[at(boundary, m)] = device;
      }
      if (job.layers.last == layers_) now.outputs_ms = std::max(now.outputs_ms, clock);
    }
    if (job.phase != Phase::kForward) {
      now.gradient_ms[at(job.layers.first, m)] = clock;
      now.gradient_device[at(job.layers.first, m)] = device;
    }
  }
  double landed_ms = clock;
  if (job.phase != Phase::kForward && down_ms_per_byte_ > 0) {
    const bool whole = static_cast<std::size_t>(job.microbatches.size()) == microbatches_;
    landed_ms = std::max(clock, links.landed_ms) +
                down_ms_per_byte_ * static_cast<double>(sums_.sent_gradient_bytes(job.layers, whole));
  }
  if (keep) {
    if (job.phase != Phase::kForward) {
      for (int layer = job.layers.first; layer < job.layers.last; ++layer) {
        double& of_layer_ms = now.landed_ms[static_cast<std::size_t>(layer)];
        of_layer_ms = std::max(of_layer_ms, landed_ms);
      }
    }
    free_ms_[static_cast<std::size_t>(device)] = clock;
    kept_.meet(job.layers, device);
    links = {arrived_ms, free_ms, job.phase == Phase::kForward ? links.landed_ms : landed_ms};
  }
  return rules_.asynchronous ? clock : landed_ms;
}

}  // namespace roundpipe::schedule
