#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <span>
#include <tuple>
#include <vector>

#include <roundpipe/simulate/link_simulator.h>

// The rules of link_simulator.h once more, slow and obvious: every transfer, computation and update is written down
// beforehand, and at each moment all of them are asked whether they can begin.
namespace roundpipe::simulate::naive {

constexpr double kNever = std::numeric_limits<double>::infinity();

struct Task {
  enum Kind { kUpload, kDownload, kCompute, kUpdate } kind = kCompute;
  schedule::Priority priority{};
  int step = 0, job = 0, device = 0, place = 0;  // place: of the job in its device's order
  int microbatch = -1, index = 0;                // index: of the microbatch in the job
  int boundary = 0;                              // of a value; the layer of an update
  double work = 0;                               // bytes or milliseconds
  std::vector<std::size_t> after;                // tasks that end before this one is requested
  double wanted_ms = kNever, requested_ms = kNever, begun_ms = kNever, ended_ms = kNever;
  bool running = false;
};

class Links {
 public:
  Links(std::span<const schedule::Plan> plans, const schedule::LayerCosts& costs, const schedule::Cluster& cluster,
        const LinkRules& rules)
      : plans_(plans), costs_(costs), cluster_(cluster), rules_(rules), sums_(costs, plans[0].first_backward_layer) {
    write_down();
  }

  // When each computation (step, job, microbatch) ends.
  std::map<std::tuple<int, int, int>, double> run() {
    while (true) {
      request();
      begin();
      const double next = next_ms();
      if (next == kNever) break;
      advance(next);
    }
    std::map<std::tuple<int, int, int>, double> ends;
    for (const Task& task : tasks_) {
      if (task.kind == Task::kCompute && task.boundary == 1)
        ends[{task.step, task.job, task.microbatch}] = task.ended_ms;
    }
    return ends;
  }
  double landed_ms() const { return now_ms_; }

 private:
  using Key = std::tuple<int, int, int, int>;  // step, boundary or layer, microbatch or job, -

  std::size_t add(Task task) {
    tasks_.push_back(std::move(task));
    return tasks_.size() - 1;
  }

  void write_down() {
    const schedule::Plan& first = plans_[0];
    const int layers = first.layers, stale = rules_.timing.asynchronous ? 2 : 1;
    std::vector<std::tuple<double, int, int>> order;
    for (int step = 0; step < static_cast<int>(plans_.size()); ++step) {
      for (int job = 0; job < static_cast<int>(plans_[step].jobs.size()); ++job)
        order.emplace_back(step + plans_[step].jobs[job].order, step, job);
    }
    std::ranges::stable_sort(order, {}, [](const auto& turn) { return std::get<0>(turn); });
    std::map<Key, std::size_t> value, gradient;                      // downloads
    std::map<std::pair<int, int>, std::vector<std::size_t>> landed;  // of a step and layer
    std::map<std::pair<int, int>, std::size_t> updates;
    std::map<int, int> places;
    std::vector<char> read(layers + 1, 0);
    for (const auto& plan : plans_) {
      for (const auto& job : plan.jobs) read[job.layers.first] = 1;
    }
    // Downloads and updates first, so that uploads can name them.
    for (const auto& [_, step, number] : order) {
      const schedule::Job& job = plans_[step].jobs[number];
      for (int m = job.microbatches.first; m < job.microbatches.last; ++m) {
        Task down{.kind = Task::kDownload, .step = step, .job = number, .device = job.device, .microbatch = m};
        down.priority = schedule::Priority::kActivation;
        for (int b = job.layers.first + 1; job.phase == schedule::Phase::kForward && b <= job.layers.last; ++b) {
          if (b == layers || !read[b]) continue;
          down.boundary = b;
          down.work = static_cast<double>(costs_[b - 1].activation_bytes);
          value[{step, b, m, 0}] = add(down);
        }
        down.priority = schedule::Priority::kBoundaryGradient;
        down.boundary = job.layers.first;
        const bool gives = job.phase != schedule::Phase::kForward && job.layers.first > first.first_backward_layer;
        if (!gives) continue;
        down.work = static_cast<double>(costs_[job.layers.first - 1].activation_bytes);
        gradient[{step, job.layers.first, m, 0}] = add(down);
      }
      if (job.phase == schedule::Phase::kForward) continue;
      Task down{.kind = Task::kDownload, .step = step, .job = number, .device = job.device};
      down.priority = schedule::Priority::kParameterGradient;
      for (int l = job.layers.last - 1; l >= job.layers.first; --l) {
        const schedule::LayerCost& cost = costs_[static_cast<std::size_t>(l)];
        const bool shared = job.microbatches.size() < first.microbatches;
        down.work = l < first.first_backward_layer ? 0 : static_cast<double>(cost.gradient_bytes) * (shared ? 2 : 1);
        down.boundary = l;
        landed[{step, l}].push_back(add(down));
      }
    }
    for (const auto& [key, gradients] : landed) {
      Task update{.kind = Task::kUpdate, .step = key.first, .boundary = key.second, .after = gradients};
      const schedule::LayerCost& cost = costs_[key.second];
      const auto bytes = static_cast<double>(std::min(cost.weight_bytes, cost.gradient_bytes));
      if (shares())
        update.work = bytes * rules_.update.traffic;
      else if (rules_.update.gb_per_s > 0)
        update.work = bytes / (rules_.update.gb_per_s * 1e6);
      updates[key] = add(update);
    }
    for (const auto& [_, step, number] : order) {
      const schedule::Job& job = plans_[step].jobs[number];
      Task up{.kind = Task::kUpload, .step = step, .job = number, .device = job.device, .place = places[job.device]++};
      up.priority = schedule::Priority::kWeight;
      for (int layer = job.layers.first; job.phase != schedule::Phase::kBackward && layer < job.layers.last; ++layer) {
        if (updates.contains({step - stale, layer})) up.after.push_back(updates.at({step - stale, layer}));
      }
      std::vector<std::size_t> weights;
      for (int layer = job.layers.first; layer < job.layers.last; ++layer) {
        up.boundary = layer;
        up.work = static_cast<double>(costs_[static_cast<std::size_t>(layer)].weight_bytes);
        weights.push_back(add(up));
      }
      const bool backward = job.phase == schedule::Phase::kBackward;
      const double speed = cluster_.devices[job.device].speed;
      std::vector<std::size_t> last;  // what comes before the next computation
      for (int m = job.microbatches.first; m < job.microbatches.last; ++m) {
        up.microbatch = m;
        up.index = m - job.microbatches.first;
        Task compute = up;
        compute.kind = Task::kCompute;
        compute.boundary = 0;
        if (job.layers.first > 0) {
          up.priority = schedule::Priority::kActivation;
          up.boundary = job.layers.first;
          up.work = static_cast<double>(costs_[up.boundary - 1].activation_bytes);
          up.after = {value.at({step, up.boundary, m, 0})};
          last.push_back(add(up));
        }
        // Layer by layer up and, unless it is a forward job, down again; the last one counts as the end.
        for (int layer = job.layers.first; layer < job.layers.last; ++layer) {
          const schedule::Range one{layer, layer + 1};
          compute.after = last;
          compute.after.push_back(weights[static_cast<std::size_t>(layer - job.layers.first)]);
          compute.work = (backward ? sums_.recompute_ms(one) : sums_.forward_ms(one)) / speed;
          compute.boundary = job.phase == schedule::Phase::kForward && layer + 1 == job.layers.last ? 1 : 0;
          last = {add(compute)};
        }
        if (backward) {
          up.priority = schedule::Priority::kBoundaryGradient;
          up.boundary = job.layers.last;
          up.work = static_cast<double>(costs_[up.boundary - 1].activation_bytes);
          up.after = {gradient.at({step, up.boundary, m, 0})};
          last.push_back(add(up));
        }
        for (int layer = job.layers.last; job.phase != schedule::Phase::kForward && layer-- > job.layers.first;) {
          compute.after = last;
          compute.work = sums_.backward_ms({layer, layer + 1}) / speed;
          compute.boundary = layer == job.layers.first ? 1 : 0;
          last = {add(compute)};
          for (Task& task : tasks_) {
            const bool gradient_of_layer = task.kind == Task::kDownload && task.step == step && task.job == number &&
                                           task.microbatch < 0 && task.boundary == layer;
            if (gradient_of_layer && m + 1 == job.microbatches.last) task.after.push_back(last[0]);
          }
        }
        for (Task& task : tasks_) {
          if (task.kind == Task::kDownload && task.step == step && task.job == number && task.microbatch == m)
            task.after.push_back(last[0]);
        }
      }
      job_ends_[{job.device, up.place}] = last[0];
    }
  }

  bool ended(std::size_t task) const { return tasks_[task].ended_ms <= now_ms_; }

  // The jobs of its device that have ended, and the microbatches of this task's job.
  bool near(const Task& task) const {
    if (task.place >= 2 && !ended(job_ends_.at({task.device, task.place - 2}))) return false;
    if (task.microbatch < 0 || task.kind == Task::kCompute) return true;
    const int first_unread = task.index - rules_.prefetched_values;
    if (first_unread < 0) return true;
    return std::ranges::any_of(tasks_, [&](const Task& other) {
      return other.kind == Task::kCompute && other.boundary == 1 && other.step == task.step && other.job == task.job &&
             other.index == first_unread && other.ended_ms <= now_ms_;
    });
  }

  void request() {
    for (bool again = true; again;) {
      again = false;
      for (Task& task : tasks_) {
        if (task.requested_ms != kNever) continue;
        if (task.kind == Task::kUpload && task.wanted_ms == kNever && near(task)) task.wanted_ms = now_ms_;
        if (!std::ranges::all_of(task.after, [&](std::size_t before) { return ended(before); })) continue;
        if (task.kind == Task::kUpload && task.wanted_ms == kNever) continue;
        if (task.kind == Task::kCompute && task.place > 0 && !ended(job_ends_.at({task.device, task.place - 1})))
          continue;
        task.requested_ms = now_ms_;
        const bool may_be_nothing =
            task.kind == Task::kUpdate || task.priority == schedule::Priority::kParameterGradient;
        if (!may_be_nothing || task.work > 0) continue;
        task.begun_ms = task.ended_ms = now_ms_;
        again = true;
      }
    }
  }

  // One task at a time for each device, direction of a link, and the optimizer.
  void begin() {
    std::map<std::pair<int, int>, std::vector<Task*>> waiting;
    std::map<std::pair<int, int>, bool> busy;
    for (Task& task : tasks_) {
      const std::pair<int, int> who{task.kind, task.kind == Task::kUpdate ? 0 : task.device};
      if (task.running) busy[who] = true;
      if (!task.running && task.requested_ms != kNever && task.ended_ms == kNever) waiting[who].push_back(&task);
    }
    for (auto& [who, tasks] : waiting) {
      if (busy[who]) continue;
      const bool transfers = who.first == Task::kUpload || who.first == Task::kDownload;
      Task* best = *std::ranges::min_element(tasks, {}, [&](const Task* task) {
        const int urgent = transfers && rules_.priorities ? static_cast<int>(task->priority) : 0;
        const double asked = who.first == Task::kUpdate ? 0 : task->requested_ms;
        const bool at_last = task->priority == schedule::Priority::kParameterGradient;
        // At one moment, what was wanted first is requested first; then by the order of jobs and of microbatches.
        const int order = who.first == Task::kUpdate ? task->step : task->place;
        return std::make_tuple(urgent, asked, who.first == Task::kUpload ? task->wanted_ms : 0, order, at_last ? 1 : 0,
                               task->microbatch, task->boundary);
      });
      best->running = true;
      if (best->begun_ms == kNever) best->begun_ms = now_ms_;
      chunk_[best] = transfers && rules_.chunk_bytes > 0 ? std::min(best->work, static_cast<double>(rules_.chunk_bytes))
                                                         : best->work;
    }
  }

  // Whether an update moves bytes of the host's memory, as a transfer does.
  bool shares() const { return cluster_.host_gb_per_s > 0 && rules_.update.traffic > 0; }
  bool moves(const Task& task) const {
    return task.kind == Task::kUpload || task.kind == Task::kDownload || (task.kind == Task::kUpdate && shares());
  }

  double own_rate(const Task& task) const {
    double gb_per_s = task.kind == Task::kUpload ? cluster_.link_up_gb_per_s : cluster_.link_down_gb_per_s;
    if (task.kind == Task::kUpdate) gb_per_s = rules_.update.gb_per_s * rules_.update.traffic;
    return gb_per_s > 0 ? gb_per_s * 1e6 : kNever;
  }

  // The slowest first, each takes its own rate or, if that is less, an even part of what is left.
  double rate(const Task& task) const {
    if (!moves(task)) return 1;
    if (cluster_.host_gb_per_s <= 0) return own_rate(task);
    std::vector<double> sharing;
    for (const Task& other : tasks_) {
      if (other.running && moves(other)) sharing.push_back(own_rate(other));
    }
    std::ranges::sort(sharing);
    double left = cluster_.host_gb_per_s * 1e6;
    for (std::size_t i = 0; i < sharing.size(); ++i) {
      const double part = std::min(sharing[i], left / static_cast<double>(sharing.size() - i));
      if (sharing[i] == own_rate(task)) return part;
      left -= part;
    }
    return kNever;
  }

  double next_ms() const {
    double next = kNever;
    for (const auto& [task, left] : chunk_) next = std::min(next, now_ms_ + left / rate(*task));
    return next;
  }

  void advance(double to_ms) {
    std::vector<Task*> over;
    std::map<Task*, double> rates;
    for (const auto& [task, _] : chunk_) rates[task] = rate(*task);
    for (auto& [task, left] : chunk_) {
      const bool bytes = moves(*task);
      const double moved = rates[task] == kNever ? left : std::min(left, rates[task] * (to_ms - now_ms_));
      left -= moved;
      task->work -= moved;
      if (left <= (bytes ? 0.5 : 1e-9)) over.push_back(task);
    }
    now_ms_ = to_ms;
    for (Task* task : over) {
      chunk_.erase(task);
      task->running = false;
      const bool bytes = moves(*task);
      if (task->work <= (bytes ? 0.5 : 1e-9)) task->ended_ms = now_ms_;
    }
  }

  const std::span<const schedule::Plan> plans_;
  const schedule::LayerCosts& costs_;
  const schedule::Cluster& cluster_;
  const LinkRules rules_;
  const schedule::CostSums sums_;
  std::vector<Task> tasks_;
  std::map<std::pair<int, int>, std::size_t> job_ends_;  // of a device and place: the last computation
  std::map<Task*, double> chunk_;                        // what is left of the running pieces
  double now_ms_ = 0;
};

}  // namespace roundpipe::simulate::naive
