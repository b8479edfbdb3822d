#include <roundpipe/simulate/simulator.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include <roundpipe/schedule/placer.h>

namespace roundpipe::simulate {

using schedule::Job;
using schedule::Phase;
using schedule::Plan;
using schedule::Range;

namespace {

// The dependencies of an event besides its device, without hops. `ends` holds when each (job, microbatch) of a step
// ends.
class Dependencies {
 public:
  explicit Dependencies(const Plan& plan)
      : plan_(plan),
        jobs_(plan),
        outside_loss_(schedule::mode_of(plan) == schedule::PlanMode::kTrain),
        microbatches_(static_cast<std::size_t>(plan.microbatches)) {}

  std::size_t job_cells() const { return plan_.jobs.size() * microbatches_; }
  std::size_t cell(int job, int m) const {
    return static_cast<std::size_t>(job) * microbatches_ + static_cast<std::size_t>(m);
  }

  // When the stage's input for microbatch `m` is ready.
  double input_ms(const Job& job, int m, const std::vector<double>& ends) const {
    double time = job.layers.first == 0 ? 0 : ends[cell(jobs_.forward(job.layers.first - 1, m), m)];
    if (job.phase == Phase::kBackward && outside_loss_) time = std::max(time, loss_ms(ends));
    return time;
  }

  // When the gradient of the stage's output is ready. REQUIRES: a backward job.
  double gradient_ms(const Job& job, int m, const std::vector<double>& ends) const {
    if (job.layers.last == plan_.layers) return loss_ms(ends);
    return ends[cell(jobs_.backward(job.layers.last, m), m)];
  }

  // When every gradient of the job's trainable layers has landed. `ends` is of the step that makes the gradients.
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
  double loss_ms(const std::vector<double>& ends) const {
    double time = 0;
    for (int m = 0; m < plan_.microbatches; ++m)
      time = std::max(time, ends[cell(jobs_.forward(plan_.layers - 1, m), m)]);
    return time;
  }

  const Plan& plan_;
  const schedule::JobIndex jobs_;
  const bool outside_loss_;
  const std::size_t microbatches_;
};

// One job of one step.
struct Turn {
  int step;
  int job;
};

// Every job of every step, in the order in which devices run them.
std::vector<Turn> turns_of(std::span<const Plan> plans) {
  std::vector<Turn> turns;
  for (int step = 0; step < static_cast<int>(plans.size()); ++step) {
    for (int job = 0; job < static_cast<int>(plans[static_cast<std::size_t>(step)].jobs.size()); ++job)
      turns.push_back({step, job});
  }
  std::ranges::stable_sort(turns, {}, [&](const Turn& turn) {
    return turn.step + plans[static_cast<std::size_t>(turn.step)].jobs[static_cast<std::size_t>(turn.job)].order;
  });
  return turns;
}

void check_arguments(std::span<const Plan> plans, const schedule::LayerCosts& costs, const schedule::Cluster& cluster,
                     schedule::TimingRules rules) {
  const auto require = [](bool ok, const std::string& what) {
    if (!ok) throw std::invalid_argument("[simulate] " + what);
  };
  require(!plans.empty(), "steps is 0, expected at least 1");
  for (std::size_t step = 0; step < plans.size(); ++step) {
    const Plan& plan = plans[step];
    if (step == 0 || plan != plans[step - 1]) schedule::validate(plan, schedule::mode_of(plan));
    require(plan.layers == plans[0].layers && plan.microbatches == plans[0].microbatches &&
                plan.devices == plans[0].devices && plan.first_backward_layer == plans[0].first_backward_layer,
            "plan " + std::to_string(step) + " has other sizes than the first");
    require(rules.asynchronous || plan.jobs.back().order <= 1, "the plan interleaves steps that are synchronous");
  }
  schedule::validate(costs);
  schedule::validate(cluster);
  require(
      static_cast<int>(costs.size()) == plans[0].layers,
      "costs has " + std::to_string(costs.size()) + " layers, expected the plan's " + std::to_string(plans[0].layers));
  require(static_cast<int>(cluster.devices.size()) == plans[0].devices,
          "cluster has " + std::to_string(cluster.devices.size()) + " devices, expected the plan's " +
              std::to_string(plans[0].devices));
}

double idle_share(double busy_ms, int devices, double span_ms) {
  return span_ms > 0 ? 1 - busy_ms / (devices * span_ms) : 0;
}

}  // namespace

Timeline simulate(const Plan& plan, const schedule::LayerCosts& costs, const schedule::Cluster& cluster,
                  const SimulateOptions& options) {
  if (options.steps < 1)
    throw std::invalid_argument("[simulate] steps is " + std::to_string(options.steps) + ", expected at least 1");
  const std::vector<Plan> plans(static_cast<std::size_t>(options.steps), plan);
  return simulate(plans, costs, cluster, options.rules);
}

// When a job is visited, all its inputs are known, so one pass gives the same result as an event queue.
Timeline simulate(std::span<const Plan> plans, const schedule::LayerCosts& costs, const schedule::Cluster& cluster,
                  schedule::TimingRules rules) {
  check_arguments(plans, costs, cluster, rules);
  // Keeps every boundary that any plan reads.
  Plan shape = plans[0];
  for (const Plan& plan : plans) shape.jobs.insert(shape.jobs.end(), plan.jobs.begin(), plan.jobs.end());
  schedule::Cluster without_links = cluster;
  without_links.link_up_gb_per_s = without_links.link_down_gb_per_s = without_links.host_gb_per_s = 0;
  schedule::Progress progress(shape, costs, without_links, rules);
  std::vector<std::vector<TimelineEvent>> events(plans.size());
  for (const Turn& turn : turns_of(plans)) {
    const auto step = static_cast<std::size_t>(turn.step);
    const Job& job = plans[step].jobs[static_cast<std::size_t>(turn.job)];
    progress.run(job, job.device, turn.step, [&](const schedule::Progress::Visit& visit) {
      events[step].push_back({turn.job, visit.microbatch, job.device, turn.step, job.phase, visit.start_ms,
                              visit.end_ms, visit.recompute_ms});
    });
  }
  Timeline timeline;
  std::vector<double> step_end;
  double busy_ms = 0;
  for (const std::vector<TimelineEvent>& step : events) {
    double end_ms = 0;
    for (const TimelineEvent& event : step) {
      end_ms = std::max(end_ms, event.end_ms);
      busy_ms += event.end_ms - event.start_ms;
    }
    // A step is over when those before it are, too, though its device may be done earlier.
    step_end.push_back(step_end.empty() ? end_ms : std::max(end_ms, step_end.back()));
    timeline.events.insert(timeline.events.end(), step.begin(), step.end());
  }
  const int devices = plans[0].devices;
  timeline.makespan_ms = step_end.back();
  timeline.bubble = idle_share(busy_ms, devices, timeline.makespan_ms);
  timeline.steady_step_ms = schedule::pace_ms(step_end);
  timeline.steady_bubble = idle_share(busy_ms / static_cast<double>(plans.size()), devices, timeline.steady_step_ms);
  return timeline;
}

void check(const Timeline& timeline, const Plan& plan, schedule::TimingRules rules) {
  std::size_t per_step = 0;
  for (const Job& job : plan.jobs) per_step += static_cast<std::size_t>(job.microbatches.size());
  if (timeline.events.empty() || per_step == 0 || timeline.events.size() % per_step != 0)
    throw std::logic_error("[check] timeline has " + std::to_string(timeline.events.size()) +
                           " events, expected a multiple of the plan's " + std::to_string(per_step));
  check(timeline, std::vector<Plan>(timeline.events.size() / per_step, plan), rules);
}

void check(const Timeline& timeline, std::span<const Plan> plans, schedule::TimingRules rules) {
  const int staleness = rules.asynchronous ? 2 : 1;
  const double slack_ms = 1e-9 * std::max(1.0, timeline.makespan_ms);
  std::vector<Dependencies> needs;
  std::vector<std::vector<double>> ends;
  std::vector<std::vector<std::size_t>> first_event;  // [step][job]
  std::size_t count = 0;
  for (const Plan& plan : plans) {
    schedule::validate(plan, schedule::mode_of(plan));
    needs.emplace_back(plan);
    ends.emplace_back(needs.back().job_cells(), 0.0);
    auto& firsts = first_event.emplace_back();
    for (const Job& job : plan.jobs) {
      firsts.push_back(count);
      count += static_cast<std::size_t>(job.microbatches.size());
    }
  }
  if (timeline.events.size() != count)
    throw std::logic_error("[check] timeline has " + std::to_string(timeline.events.size()) +
                           " events, expected the plans' " + std::to_string(count));
  std::vector<double> free(static_cast<std::size_t>(plans[0].devices), 0.0);
  double busy_ms = 0, makespan_ms = 0;
  const TimelineEvent* event = nullptr;
  const auto require = [&](bool ok, const char* rule) {
    if (ok) return;
    throw std::logic_error("[check] event " + std::to_string(event - timeline.events.data()) + " (step " +
                           std::to_string(event->step) + ", job " + std::to_string(event->job) + ", microbatch " +
                           std::to_string(event->microbatch) + ", device " + std::to_string(event->device) + ", " +
                           std::to_string(event->start_ms) + " to " + std::to_string(event->end_ms) + " ms) " + rule);
  };
  for (const Turn& turn : turns_of(plans)) {
    const auto step = static_cast<std::size_t>(turn.step), number = static_cast<std::size_t>(turn.job);
    const Job& job = plans[step].jobs[number];
    double& device_free = free[static_cast<std::size_t>(job.device)];
    for (int m = job.microbatches.first; m < job.microbatches.last; ++m) {
      event = &timeline.events[first_event[step][number] + static_cast<std::size_t>(m - job.microbatches.first)];
      require(event->step == turn.step && event->job == turn.job && event->microbatch == m &&
                  event->device == job.device && event->phase == job.phase,
              "is not the plan's next microbatch");
      require(event->recompute_ms >= 0 && event->start_ms + event->recompute_ms <= event->end_ms + slack_ms,
              "ends before it starts");
      require(event->start_ms >= device_free - slack_ms, "starts while its device is busy");
      require(event->start_ms >= needs[step].input_ms(job, m, ends[step]) - slack_ms, "starts before its input");
      if (job.phase == Phase::kBackward) {
        require(event->start_ms + event->recompute_ms >= needs[step].gradient_ms(job, m, ends[step]) - slack_ms,
                "goes backward before its gradient");
      } else if (turn.step >= staleness) {
        const std::size_t read = step - static_cast<std::size_t>(staleness);
        require(event->start_ms >= needs[read].landed_ms(job, ends[read]) - slack_ms, "starts before its weights");
      }
      ends[step][needs[step].cell(turn.job, m)] = device_free = event->end_ms;
      busy_ms += event->end_ms - event->start_ms;
      makespan_ms = std::max(makespan_ms, event->end_ms);
    }
  }
  if (std::abs(makespan_ms - timeline.makespan_ms) > slack_ms ||
      std::abs(idle_share(busy_ms, plans[0].devices, makespan_ms) - timeline.bubble) > 1e-6)
    throw std::logic_error("[check] makespan_ms or bubble do not follow from the events");
}

}  // namespace roundpipe::simulate
