#include <roundpipe/schedule/costs.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>

#include <roundpipe/core/error.h>

namespace roundpipe::schedule {

namespace {

// Far above any layer, and so low that no sum or square of a search overflows.
constexpr double kMostMs = 1e100;
constexpr double kMostBytes = 1e15;

template <typename T>
void require_not_negative(T value, const std::string& field, double most = kMostMs) {
  if (!(value >= 0) || !(static_cast<double>(value) <= most))
    throw std::invalid_argument(
        concat("[validate] ", field, " is ", value, ", expected a number that is not negative and at most ", most));
}

}  // namespace

void validate(const LayerCosts& costs) {
  if (costs.empty()) throw std::invalid_argument("[validate] costs has no layers, expected at least one");
  for (std::size_t layer = 0; layer < costs.size(); ++layer) {
    const LayerCost& cost = costs[layer];
    const std::string name = "costs[" + std::to_string(layer) + "].";
    require_not_negative(cost.forward_ms, name + "forward_ms");
    require_not_negative(cost.backward_ms, name + "backward_ms");
    require_not_negative(cost.weight_bytes, name + "weight_bytes", kMostBytes);
    require_not_negative(cost.gradient_bytes, name + "gradient_bytes", kMostBytes);
    require_not_negative(cost.activation_bytes, name + "activation_bytes", kMostBytes);
    require_not_negative(cost.saved_bytes, name + "saved_bytes", kMostBytes);
    require_not_negative(cost.frozen_bytes, name + "frozen_bytes", cost.weight_bytes);
    if (cost.partial_sum_bytes)
      require_not_negative(*cost.partial_sum_bytes, name + "partial_sum_bytes", 2 * kMostBytes);
    if (cost.recompute_ms) require_not_negative(*cost.recompute_ms, name + "recompute_ms");
  }
}

void validate(const Cluster& cluster) {
  if (cluster.devices.empty())
    throw std::invalid_argument("[validate] cluster.devices is empty, expected at least one device");
  for (std::size_t device = 0; device < cluster.devices.size(); ++device) {
    const std::string name = "cluster.devices[" + std::to_string(device) + "].";
    const ClusterDevice& spec = cluster.devices[device];
    if (!(spec.speed > 0) || !std::isfinite(spec.speed))
      throw std::invalid_argument("[validate] " + name + "speed is " + std::to_string(spec.speed) +
                                  ", expected a finite number above 0");
    require_not_negative(spec.memory_bytes, name + "memory_bytes");
    require_not_negative(spec.resident_bytes, name + "resident_bytes");
  }
  require_not_negative(cluster.link_up_gb_per_s, "cluster.link_up_gb_per_s");
  require_not_negative(cluster.link_down_gb_per_s, "cluster.link_down_gb_per_s");
  require_not_negative(cluster.host_gb_per_s, "cluster.host_gb_per_s");
  require_not_negative(cluster.hop_latency_ms, "cluster.hop_latency_ms");
}

void validate(const UpdateRate& update) {
  require_not_negative(update.gb_per_s, "update.gb_per_s");
  require_not_negative(update.traffic, "update.traffic");
}

void average_alike(LayerCosts& costs, double within) {
  const auto kind_of = [](const LayerCost& cost) {
    return std::make_tuple(cost.weight_bytes, cost.gradient_bytes, cost.activation_bytes, cost.trained);
  };
  std::map<decltype(kind_of(costs.front())), std::vector<LayerCost*>> kinds;
  for (LayerCost& cost : costs) kinds[kind_of(cost)].push_back(&cost);
  for (auto& [kind, alike] : kinds) {
    for (double LayerCost::* time : {&LayerCost::forward_ms, &LayerCost::backward_ms}) {
      double least_ms = alike.front()->*time, most_ms = least_ms, sum_ms = 0;
      for (const LayerCost* cost : alike) {
        least_ms = std::min(least_ms, cost->*time);
        most_ms = std::max(most_ms, cost->*time);
        sum_ms += cost->*time;
      }
      if (most_ms > least_ms * (1 + within)) continue;
      for (LayerCost* cost : alike) cost->*time = sum_ms / static_cast<double>(alike.size());
    }
  }
}

std::int64_t largest_room_bytes(const Cluster& cluster) {
  std::int64_t room_bytes = 0;
  for (const ClusterDevice& device : cluster.devices) {
    if (device.memory_bytes == 0) return 0;
    room_bytes = std::max(room_bytes, device.memory_bytes);
  }
  return room_bytes;
}

KeptWeights::KeptWeights(const LayerCosts& costs, const Cluster& cluster) {
  const bool has_frozen = std::ranges::any_of(costs, [](const LayerCost& cost) { return cost.frozen_bytes > 0; });
  const bool has_room =
      std::ranges::any_of(cluster.devices, [](const ClusterDevice& device) { return device.resident_bytes > 0; });
  if (!has_frozen || !has_room) return;
  for (const LayerCost& cost : costs) frozen_.push_back(cost.frozen_bytes);
  for (const ClusterDevice& device : cluster.devices) room_.push_back(device.resident_bytes);
  kept_.assign(frozen_.size() * room_.size(), 0);
}

std::int64_t KeptWeights::kept_bytes(Range layers, int device) const {
  std::int64_t bytes = 0;
  for (int layer = layers.first; any() && layer < layers.last; ++layer) {
    if (kept_[at(layer, device)] != 0) bytes += frozen_[static_cast<std::size_t>(layer)];
  }
  return bytes;
}

void KeptWeights::meet(Range layers, int device) {
  for (int layer = layers.first; any() && layer < layers.last; ++layer) {
    const std::int64_t bytes = frozen_[static_cast<std::size_t>(layer)];
    std::int64_t& room = room_[static_cast<std::size_t>(device)];
    if (kept_[at(layer, device)] != 0 || bytes > room) continue;
    kept_[at(layer, device)] = 1;
    room -= bytes;
  }
}

CostSums::CostSums(const LayerCosts& costs, int first_backward_layer, int single_below)
    : forward_{0},
      recompute_{0},
      backward_{0},
      weight_{0},
      gradient_{0},
      partial_sum_{0},
      saved_{0},
      trained_{0},
      single_below_(single_below) {
  for (std::size_t layer = 0; layer < costs.size(); ++layer) {
    const LayerCost& cost = costs[layer];
    const bool backward = static_cast<int>(layer) >= first_backward_layer;
    forward_.push_back(forward_.back() + cost.forward_ms);
    recompute_.push_back(recompute_.back() + cost.recompute_ms.value_or(cost.forward_ms));
    backward_.push_back(backward_.back() + (backward ? cost.backward_ms : 0));
    weight_.push_back(weight_.back() + cost.weight_bytes);
    gradient_.push_back(gradient_.back() + (backward ? cost.gradient_bytes : 0));
    const std::int64_t partial_bytes = cost.partial_sum_bytes.value_or(2 * cost.gradient_bytes);
    partial_sum_.push_back(partial_sum_.back() + (backward ? partial_bytes : 0));
    saved_.push_back(saved_.back() + cost.saved_bytes);
    trained_.push_back(trained_.back() + (backward && cost.trained ? 1 : 0));
    if (cost.joined.last_layer > 0 && backward) joined_.emplace_back(static_cast<int>(layer), cost.joined);
    activation_.push_back(cost.activation_bytes);
  }
}

std::int64_t CostSums::sent_gradient_bytes(Range layers, bool whole) const {
  std::int64_t bytes = between(whole ? gradient_ : partial_sum_, layers);
  for (const auto& [first, joined] : joined_) {
    if (whole && joined.holds(first, layers.first, layers.last)) bytes -= joined.saved;
  }
  return bytes;
}

std::int64_t CostSums::leaving_gradient_bytes(int layer, Range layers, bool whole) const {
  const auto of = [&](int at) { return between(whole ? gradient_ : partial_sum_, {at, at + 1}); };
  std::int64_t bytes = of(layer);
  for (const auto& [first, joined] : joined_) {
    if (!whole || !joined.holds(first, layers.first, layers.last)) continue;
    // One sum leaves, with the first of its layers.
    const std::int64_t with_first = std::min(joined.saved, of(joined.last_layer));
    if (layer == joined.last_layer) bytes -= with_first;
    if (layer == first) bytes -= joined.saved - with_first;
  }
  return bytes;
}

std::int64_t CostSums::visit_bytes(Range layers, bool backward, bool least) const {
  const std::int64_t weights = weight_bytes(layers) * (least ? 1 : 2);
  const std::int64_t out = activation_[static_cast<std::size_t>(layers.last) - 1];
  return weights + (backward ? gradient_bytes(layers) + saved_bytes(layers) : 0) +
         2 * (input_bytes(layers.first) + out);
}

}  // namespace roundpipe::schedule
