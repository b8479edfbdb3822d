#include <roundpipe/schedule/moved_bytes.h>

#include <algorithm>
#include <array>
#include <vector>

namespace roundpipe::schedule {

namespace {

constexpr double kBytesPerMs = 1e6;  // of 1 GB/s

double ms(double bytes, double gb_per_s) { return gb_per_s > 0 ? bytes / (gb_per_s * kBytesPerMs) : 0; }

}  // namespace

MovedBytes moved_bytes(const Plan& plan, const LayerCosts& costs, const CostSums& sums) {
  const auto boundary_bytes = [&](int boundary) {
    return static_cast<double>(costs[static_cast<std::size_t>(boundary) - 1].activation_bytes);
  };
  MovedBytes moved;
  std::vector<char> read(costs.size() + 1, 0);
  for (const Job& job : plan.jobs) {
    const bool backward = job.phase != Phase::kForward;
    const auto [first, last] = job.layers;
    moved.up += static_cast<double>(sums.weight_bytes(job.layers));
    const bool whole = job.microbatches.size() == plan.microbatches;
    if (backward) moved.down += static_cast<double>(sums.sent_gradient_bytes(job.layers, whole));
    if (first > 0) {
      read[static_cast<std::size_t>(first)] = 1;
      moved.up += boundary_bytes(first) * job.microbatches.size();
    }
    if (job.phase == Phase::kBackward && last < plan.layers) moved.up += boundary_bytes(last) * job.microbatches.size();
    if (backward && first > plan.first_backward_layer) moved.down += boundary_bytes(first) * job.microbatches.size();
  }
  for (int boundary = 1; boundary < plan.layers; ++boundary) {
    if (read[static_cast<std::size_t>(boundary)]) moved.down += boundary_bytes(boundary) * plan.microbatches;
  }
  if (mode_of(plan) != PlanMode::kInference) {
    for (int layer = plan.first_backward_layer; layer < plan.layers; ++layer)
      moved.updated += static_cast<double>(costs[static_cast<std::size_t>(layer)].updated_bytes());
  }
  return moved;
}

bool has_rates(const Cluster& cluster) {
  return cluster.link_up_gb_per_s > 0 || cluster.link_down_gb_per_s > 0 || cluster.host_gb_per_s > 0;
}

LeastTime least_time(const MovedBytes& moved, const Cluster& cluster, const UpdateRate& update) {
  const auto links = static_cast<double>(cluster.devices.size());
  const double through_host = moved.up + moved.down + moved.updated * update.traffic;
  const std::array times = {LeastTime{ms(moved.up, links * cluster.link_up_gb_per_s), "links up"},
                            LeastTime{ms(moved.down, links * cluster.link_down_gb_per_s), "links down"},
                            LeastTime{ms(through_host, cluster.host_gb_per_s), "host memory"},
                            LeastTime{ms(moved.updated, update.gb_per_s), "optimizer"}};
  return *std::ranges::max_element(times, {}, &LeastTime::ms);
}

double time_in_turn_ms(const MovedBytes& moved, const Cluster& cluster, const UpdateRate& update) {
  return ms(moved.up, cluster.link_up_gb_per_s) + ms(moved.down, cluster.link_down_gb_per_s) +
         ms(moved.updated, update.gb_per_s);
}

double hop_ms(const LayerCosts& costs, const Cluster& cluster) {
  double bytes = 0;
  for (std::size_t layer = 0; layer + 1 < costs.size(); ++layer)
    bytes = std::max(bytes, static_cast<double>(costs[layer].activation_bytes));
  const auto slowest = [&](double link) { return std::max(ms(bytes, link), ms(bytes, cluster.host_gb_per_s)); };
  return slowest(cluster.link_up_gb_per_s) + slowest(cluster.link_down_gb_per_s);
}

}  // namespace roundpipe::schedule
