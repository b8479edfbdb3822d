#include <roundpipe/simulate/simulator.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace roundpipe::simulate {

using schedule::Job;
using schedule::Phase;
using schedule::Plan;
using schedule::Range;

namespace {

// What an event waits for, besides its device. Shared by simulate() and check().
// `ends` holds the end of each (job, microbatch) of one step. A hop is added where a value changes device.
class Dependencies {
 public:
  Dependencies(const Plan& plan, double hop_ms)
      : plan_(plan),
        jobs_(plan),
        outside_loss_(schedule::mode_of(plan) == schedule::PlanMode::kTrain),
        hop_ms_(hop_ms),
        microbatches_(static_cast<std::size_t>(plan.microbatches)) {}

  std::size_t job_cells() const { return plan_.jobs.size() * microbatches_; }
  std::size_t cell(int job, int m) const {
    return static_cast<std::size_t>(job) * microbatches_ + static_cast<std::size_t>(m);
  }

  // When the stage's input of microbatch `m` is on the job's device.
  double input_ms(const Job& job, int m, const std::vector<double>& ends) const {
    double time = job.layers.first == 0 ? 0 : arrival(jobs_.forward(job.layers.first - 1, m), job.device, m, ends);
    if (job.phase == Phase::kBackward && outside_loss_) time = std::max(time, loss_ms(ends));
    return time;
  }

  // When the gradient of the stage's output is on the job's device. REQUIRES: a backward job.
  double gradient_ms(const Job& job, int m, const std::vector<double>& ends) const {
    if (job.layers.last == plan_.layers) return loss_ms(ends) + hop_ms_;
    return arrival(jobs_.backward(job.layers.last, m), job.device, m, ends);
  }

  // When every gradient of the job's trainable layers has landed, given the ends of the step that makes them.
  double landed_ms(const Job& job, const std::vector<double>& ends) const {
    double time = 0;
    for (int layer = job.layers.first; layer < job.layers.last; ++layer) {
      for (int m = 0; m < plan_.microbatches; ++m) {
        const int writer = jobs_.backward(layer, m);
        if (writer >= 0) time = std::max(time, ends[cell(writer, m)]);
      }
    }
    return time;
  }

 private:
  double arrival(int from, int device, int m, const std::vector<double>& ends) const {
    return ends[cell(from, m)] + (plan_.jobs[static_cast<std::size_t>(from)].device == device ? 0 : hop_ms_);
  }

  double loss_ms(const std::vector<double>& ends) const {
    double time = 0;
    for (int m = 0; m < plan_.microbatches; ++m)
      time = std::max(time, ends[cell(jobs_.forward(plan_.layers - 1, m), m)]);
    return time;
  }

  const Plan& plan_;
  const schedule::JobIndex jobs_;
  const bool outside_loss_;
  const double hop_ms_;
  const std::size_t microbatches_;
};

// One microbatch of a job on a device of speed 1.
struct Work {
  double recompute_ms = 0;
  double rest_ms = 0;
};

Work work_of(const Job& job, const Plan& plan, const schedule::LayerCosts& costs) {
  const double forward = schedule::forward_ms(costs, job.layers);
  const double backward =
      schedule::backward_ms(costs, {std::max(job.layers.first, plan.first_backward_layer), job.layers.last});
  switch (job.phase) {
    case Phase::kForward:
      return {0, forward};
    case Phase::kFused:
      return {0, forward + backward};
    case Phase::kBackward:
      return {forward, backward};
  }
  return {};
}

void check_arguments(const Plan& plan, const schedule::LayerCosts& costs, const schedule::Cluster& cluster,
                     const SimulateOptions& options) {
  schedule::validate(plan, schedule::mode_of(plan));
  schedule::validate(costs);
  schedule::validate(cluster);
  const auto fail = [](const std::string& what) { throw std::invalid_argument("[simulate] " + what); };
  if (static_cast<int>(costs.size()) != plan.layers)
    fail("costs has " + std::to_string(costs.size()) + " layers, expected the plan's " + std::to_string(plan.layers));
  if (static_cast<int>(cluster.devices.size()) != plan.devices)
    fail("cluster has " + std::to_string(cluster.devices.size()) + " devices, expected the plan's " +
         std::to_string(plan.devices));
  if (options.steps < 1) fail("steps is " + std::to_string(options.steps) + ", expected at least 1");
  if (options.hop_latency_ms && !(*options.hop_latency_ms >= 0 && std::isfinite(*options.hop_latency_ms)))
    fail("hop_latency_ms is " + std::to_string(*options.hop_latency_ms) + ", expected a finite number of at least 0");
}

double idle_share(double busy_ms, int devices, double span_ms) {
  return span_ms > 0 ? 1 - busy_ms / (devices * span_ms) : 0;
}

}  // namespace

// Jobs are visited in an order in which every input is known, so one pass gives what an event queue would.
Timeline simulate(const Plan& plan, const schedule::LayerCosts& costs, const schedule::Cluster& cluster,
                  const SimulateOptions& options) {
  check_arguments(plan, costs, cluster, options);
  const Dependencies needs(plan, options.hop_latency_ms.value_or(cluster.hop_latency_ms));
  const int staleness = options.asynchronous ? 2 : 1;

  Timeline timeline;
  std::vector<double> free(cluster.devices.size(), 0.0);
  std::vector<double> step_end(static_cast<std::size_t>(options.steps), 0.0);
  // Ends by (job, microbatch) of this step and the two before it, in turn.
  std::vector<std::vector<double>> ends(3, std::vector<double>(needs.job_cells(), 0.0));
  double busy_ms = 0;

  for (int step = 0; step < options.steps; ++step) {
    std::vector<double>& now = ends[static_cast<std::size_t>(step % 3)];
    for (int number = 0; number < static_cast<int>(plan.jobs.size()); ++number) {
      const Job& job = plan.jobs[static_cast<std::size_t>(number)];
      const std::size_t device = static_cast<std::size_t>(job.device);
      const Work work = work_of(job, plan, costs);
      const double recompute_ms = work.recompute_ms / cluster.devices[device].speed;
      const double rest_ms = work.rest_ms / cluster.devices[device].speed;
      double ready_ms = 0;
      if (job.phase != Phase::kBackward && step >= staleness)
        ready_ms = needs.landed_ms(job, ends[static_cast<std::size_t>((step - staleness) % 3)]);
      for (int m = job.microbatches.first; m < job.microbatches.last; ++m) {
        double start_ms = std::max({free[device], ready_ms, needs.input_ms(job, m, now)});
        // Recompute as late as the gradient allows: the event stays in one piece and nothing ends later.
        if (job.phase == Phase::kBackward) start_ms = std::max(start_ms, needs.gradient_ms(job, m, now) - recompute_ms);
        const double end_ms = start_ms + recompute_ms + rest_ms;
        timeline.events.push_back({number, m, job.device, step, job.phase, start_ms, end_ms, recompute_ms});
        now[needs.cell(number, m)] = free[device] = end_ms;
        busy_ms += recompute_ms + rest_ms;
      }
    }
    step_end[static_cast<std::size_t>(step)] = std::ranges::max(now);
  }

  timeline.makespan_ms = std::ranges::max(step_end);
  timeline.bubble = idle_share(busy_ms, plan.devices, timeline.makespan_ms);
  const std::size_t last = step_end.size() - 1;
  const std::size_t from = (last + 1) / 2;
  timeline.steady_step_ms =
      last == 0 ? step_end[0] : (step_end[last] - step_end[from - 1]) / static_cast<double>(last - from + 1);
  timeline.steady_bubble = idle_share(busy_ms / options.steps, plan.devices, timeline.steady_step_ms);
  return timeline;
}

void check(const Timeline& timeline, const Plan& plan, bool asynchronous) {
  schedule::validate(plan, schedule::mode_of(plan));
  const Dependencies needs(plan, 0);
  const int staleness = asynchronous ? 2 : 1;
  const double slack_ms = 1e-9 * std::max(1.0, timeline.makespan_ms);

  std::size_t per_step = 0;
  for (const Job& job : plan.jobs) per_step += static_cast<std::size_t>(job.microbatches.size());
  if (timeline.events.empty() || timeline.events.size() % per_step != 0)
    throw std::logic_error("[check] timeline has " + std::to_string(timeline.events.size()) +
                           " events, expected a multiple of the plan's " + std::to_string(per_step));

  std::vector<double> free(static_cast<std::size_t>(plan.devices), 0.0);
  std::vector<std::vector<double>> ends(timeline.events.size() / per_step, std::vector<double>(needs.job_cells(), 0.0));
  double busy_ms = 0, makespan_ms = 0;
  auto event = timeline.events.begin();
  const auto require = [&](bool ok, const char* rule) {
    if (ok) return;
    throw std::logic_error("[check] event " + std::to_string(event - timeline.events.begin()) + " (step " +
                           std::to_string(event->step) + ", job " + std::to_string(event->job) + ", microbatch " +
                           std::to_string(event->microbatch) + ", device " + std::to_string(event->device) + ", " +
                           std::to_string(event->start_ms) + " to " + std::to_string(event->end_ms) + " ms) " + rule);
  };
  for (std::size_t step = 0; step < ends.size(); ++step) {
    for (int number = 0; number < static_cast<int>(plan.jobs.size()); ++number) {
      const Job& job = plan.jobs[static_cast<std::size_t>(number)];
      double& device_free = free[static_cast<std::size_t>(job.device)];
      for (int m = job.microbatches.first; m < job.microbatches.last; ++m, ++event) {
        require(event->step == static_cast<int>(step) && event->job == number && event->microbatch == m &&
                    event->device == job.device && event->phase == job.phase,
                "is not the plan's next microbatch");
        require(event->recompute_ms >= 0 && event->start_ms + event->recompute_ms <= event->end_ms + slack_ms,
                "ends before it starts");
        require(event->start_ms >= device_free - slack_ms, "starts while its device is busy");
        require(event->start_ms >= needs.input_ms(job, m, ends[step]) - slack_ms, "starts before its input");
        if (job.phase == Phase::kBackward)
          require(event->start_ms + event->recompute_ms >= needs.gradient_ms(job, m, ends[step]) - slack_ms,
                  "goes backward before its gradient");
        else if (static_cast<int>(step) >= staleness)
          require(event->start_ms >= needs.landed_ms(job, ends[step - static_cast<std::size_t>(staleness)]) - slack_ms,
                  "starts before its weights");
        ends[step][needs.cell(number, m)] = device_free = event->end_ms;
        busy_ms += event->end_ms - event->start_ms;
        makespan_ms = std::max(makespan_ms, event->end_ms);
      }
    }
  }
  if (std::abs(makespan_ms - timeline.makespan_ms) > slack_ms ||
      std::abs(idle_share(busy_ms, plan.devices, makespan_ms) - timeline.bubble) > 1e-6)
    throw std::logic_error("[check] makespan_ms or bubble do not follow from the events");
}

}  // namespace roundpipe::simulate
