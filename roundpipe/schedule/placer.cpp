#include <roundpipe/schedule/placer.h>

#include <stdexcept>
#include <string>

namespace roundpipe::schedule {

Placer::Placer(Plan recipe, const LayerCosts& costs, const Cluster& cluster, TimingRules rules)
    : recipe_(std::move(recipe)), progress_(recipe_, costs, cluster, rules) {
  const auto fail = [](const std::string& what) { throw std::invalid_argument("[Placer] " + what); };
  if (static_cast<int>(costs.size()) != recipe_.layers)
    fail("costs has " + std::to_string(costs.size()) + " layers, expected " + std::to_string(recipe_.layers));
  if (static_cast<int>(cluster.devices.size()) != recipe_.devices)
    fail("cluster has " + std::to_string(cluster.devices.size()) + " devices, expected " +
         std::to_string(recipe_.devices));
  if (!rules.asynchronous && !recipe_.jobs.empty() && recipe_.jobs.back().order > 1)
    fail("the recipe interleaves steps, which synchronous steps cannot do; expected one without it");
  for (int device = 0; device < recipe_.devices; ++device) {
    const ClusterDevice& spec = cluster.devices[static_cast<std::size_t>(device)];
    const auto same = std::ranges::find_if(classes_, [&](const std::vector<int>& members) {
      const ClusterDevice& other = cluster.devices[static_cast<std::size_t>(members.front())];
      return other.speed == spec.speed && other.memory_bytes == spec.memory_bytes;
    });
    if (same == classes_.end()) {
      classes_.push_back({device});
    } else {
      same->push_back(device);
    }
  }
  for (const Job& job : recipe_.jobs) {
    auto& row = fits_.emplace_back();
    const bool backward = job.phase != Phase::kForward;
    const std::int64_t bytes = progress_.sums().visit_bytes(job.layers, backward, /*least=*/true);
    bytes_.push_back(bytes);
    bool any = false;
    for (const std::vector<int>& members : classes_) {
      const std::int64_t room = cluster.devices[static_cast<std::size_t>(members.front())].memory_bytes;
      row.push_back(room == 0 || bytes <= room);
      any |= row.back() != 0;
    }
    if (!any)
      fail("job " + to_string(job) + " needs " + std::to_string(bytes) +
           " bytes, more than any device has; use smaller stages");
  }
  const auto limited = [](const ClusterDevice& device) { return device.memory_bytes > 0; };
  if (std::ranges::any_of(cluster.devices, limited)) {
    for (const ClusterDevice& device : cluster.devices) room_bytes_.push_back(device.memory_bytes);
  }
  last_.assign(cluster.devices.size(), -1);
}

bool Placer::fits_beside(std::size_t number, int device) const {
  const int before = last_[static_cast<std::size_t>(device)];
  if (room_bytes_.empty() || before < 0) return true;
  const std::int64_t room = room_bytes_[static_cast<std::size_t>(device)];
  if (room == 0 || recipe_.jobs[static_cast<std::size_t>(before)].layers.size() == 1) return true;
  return bytes_[static_cast<std::size_t>(before)] + progress_.sums().weight_bytes(recipe_.jobs[number].layers) <= room;
}

bool Placer::is_better(int device, int than, const Job& job, int step) {
  const bool earlier = progress_.free_ms(device) < progress_.free_ms(than);
  if (!keeps_weights()) return earlier;
  const double own_ms = progress_.peek(job, device, step), other_ms = progress_.peek(job, than, step);
  if (own_ms != other_ms) return own_ms < other_ms;
  const std::int64_t own_bytes = progress_.kept().kept_bytes(job.layers, device);
  const std::int64_t other_bytes = progress_.kept().kept_bytes(job.layers, than);
  return own_bytes != other_bytes ? own_bytes > other_bytes : earlier;
}

int Placer::choose_device(const Job& job, std::size_t number, int step, bool beside) {
  int best = -1;
  double best_ms = 0;
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    if (!fits_[number][c]) continue;
    int candidate = -1;
    for (const int device : classes_[c]) {
      if (beside && !fits_beside(number, device)) continue;
      if (candidate < 0 || is_better(device, candidate, job, step)) candidate = device;
    }
    if (candidate < 0) continue;
    const double ms = classes_.size() == 1 ? 0 : progress_.peek(job, candidate, step);
    if (best < 0 || ms < best_ms) {
      best = candidate;
      best_ms = ms;
    }
  }
  return best;
}

void Placer::place(int ahead) {
  Placed& placed = placed_[static_cast<std::size_t>(ahead)];
  const std::size_t number = placed.devices.size();
  const Job& job = recipe_.jobs[number];
  int device = choose_device(job, number, step_ + ahead, /*beside=*/true);
  if (device < 0) {
    ++crowded_;
    device = choose_device(job, number, step_ + ahead, /*beside=*/false);
  }
  last_[static_cast<std::size_t>(device)] = static_cast<int>(number);
  placed.end_ms = std::max(placed.end_ms, progress_.run(job, device, step_ + ahead, [](const Progress::Visit&) {}));
  placed.devices.push_back(device);
}

std::vector<int> Placer::advance() {
  Placed& now = placed_[0];
  Placed& later = placed_[1];
  const std::size_t count = recipe_.jobs.size();
  while (now.devices.size() < count) {
    const double order = recipe_.jobs[now.devices.size()].order;
    const bool later_first = later.devices.size() < count && 1 + recipe_.jobs[later.devices.size()].order < order;
    place(later_first ? 1 : 0);
  }
  std::vector<int> devices = std::move(now.devices);
  end_ms_ = std::max(end_ms_, now.end_ms);
  now = std::move(later);
  later = {};
  ++step_;
  return devices;
}

Plan Placer::next() {
  const std::vector<int> devices = advance();
  Plan plan = recipe_;
  for (std::size_t i = 0; i < devices.size(); ++i) plan.jobs[i].device = devices[i];
  return plan;
}

double pace_ms(std::span<const double> ends_ms) {
  if (ends_ms.size() == 1) return ends_ms[0];
  // A least squares fit: single ends jitter by parts of a step, and using only the outer two would keep that jitter.
  const std::size_t from = ends_ms.size() / 2 - 1, count = ends_ms.size() - from;
  const double mean_place = static_cast<double>(count - 1) / 2;
  double mean_ms = 0, both = 0, places = 0;
  for (std::size_t i = 0; i < count; ++i) mean_ms += ends_ms[from + i] / static_cast<double>(count);
  for (std::size_t i = 0; i < count; ++i) {
    const double place = static_cast<double>(i) - mean_place;
    both += place * (ends_ms[from + i] - mean_ms);
    places += place * place;
  }
  return both / places;
}

Rating rate(const Plan& recipe, const LayerCosts& costs, const Cluster& cluster, TimingRules rules, int steps) {
  Placer placer(recipe, costs, cluster, rules);
  std::vector<double> ends;
  // Devices meet each layer first, whose frozen weights they then keep.
  const int before = placer.keeps_weights() && !rules.asynchronous ? recipe.devices : 0;
  double begun_ms = 0;
  for (int step = 0; step < before; ++step) {
    placer.advance();
    begun_ms = placer.end_ms();
  }
  for (int step = 0; step < (rules.asynchronous ? steps : 1); ++step) {
    placer.advance();
    ends.push_back(placer.end_ms() - begun_ms);
  }
  Rating rating;
  rating.step_ms = pace_ms(ends);
  rating.work_ms = work_ms(recipe, placer.sums());
  rating.crowded = placer.crowded();
  double speed = 0;
  for (const ClusterDevice& device : cluster.devices) speed += device.speed;
  rating.bubble = rating.step_ms > 0 ? 1 - rating.work_ms / (speed * rating.step_ms) : 0;
  return rating;
}

}  // namespace roundpipe::schedule
