#include <roundpipe/schedule/costs.h>

#include <cmath>
#include <stdexcept>
#include <string>

namespace roundpipe::schedule {

namespace {

template <typename T>
void require_not_negative(T value, const std::string& field) {
  if (!(value >= 0) || !std::isfinite(static_cast<double>(value)))
    throw std::invalid_argument("[validate] " + field + " is " + std::to_string(value) +
                                ", expected a finite number that is not negative");
}

double sum(const LayerCosts& costs, Range layers, double LayerCost::* field) {
  double total = 0;
  for (int layer = layers.first; layer < layers.last; ++layer) total += costs[static_cast<std::size_t>(layer)].*field;
  return total;
}

}  // namespace

void validate(const LayerCosts& costs) {
  if (costs.empty()) throw std::invalid_argument("[validate] costs has no layers, expected at least one");
  for (std::size_t layer = 0; layer < costs.size(); ++layer) {
    const LayerCost& cost = costs[layer];
    const std::string name = "costs[" + std::to_string(layer) + "].";
    require_not_negative(cost.forward_ms, name + "forward_ms");
    require_not_negative(cost.backward_ms, name + "backward_ms");
    require_not_negative(cost.weight_bytes, name + "weight_bytes");
    require_not_negative(cost.gradient_bytes, name + "gradient_bytes");
    require_not_negative(cost.activation_bytes, name + "activation_bytes");
    require_not_negative(cost.saved_bytes, name + "saved_bytes");
  }
}

void validate(const Cluster& cluster) {
  if (cluster.devices.empty())
    throw std::invalid_argument("[validate] cluster.devices is empty, expected at least one device");
  for (std::size_t device = 0; device < cluster.devices.size(); ++device) {
    const std::string name = "cluster.devices[" + std::to_string(device) + "].";
    const DeviceSpec& spec = cluster.devices[device];
    if (!(spec.speed > 0) || !std::isfinite(spec.speed))
      throw std::invalid_argument("[validate] " + name + "speed is " + std::to_string(spec.speed) +
                                  ", expected a finite number above 0");
    require_not_negative(spec.memory_bytes, name + "memory_bytes");
  }
  require_not_negative(cluster.link_up_gb_per_s, "cluster.link_up_gb_per_s");
  require_not_negative(cluster.link_down_gb_per_s, "cluster.link_down_gb_per_s");
  require_not_negative(cluster.host_gb_per_s, "cluster.host_gb_per_s");
  require_not_negative(cluster.hop_latency_ms, "cluster.hop_latency_ms");
}

double forward_ms(const LayerCosts& costs, Range layers) { return sum(costs, layers, &LayerCost::forward_ms); }

double backward_ms(const LayerCosts& costs, Range layers) { return sum(costs, layers, &LayerCost::backward_ms); }

}  // namespace roundpipe::schedule
