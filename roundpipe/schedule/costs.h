#pragma once

#include <cstdint>
#include <vector>

#include <roundpipe/schedule/range.h>

namespace roundpipe::schedule {

// What one layer costs. Times are those of one microbatch on a device of speed 1.
struct LayerCost {
  double forward_ms = 0;
  double backward_ms = 0;             // without the recomputed forward
  std::int64_t weight_bytes = 0;      // uploaded on each visit
  std::int64_t gradient_bytes = 0;    // downloaded after a backward visit; 0 for a frozen layer
  std::int64_t activation_bytes = 0;  // the layer's output, one microbatch
  std::int64_t saved_bytes = 0;       // kept on the device from forward to backward, one microbatch
};

using LayerCosts = std::vector<LayerCost>;

struct DeviceSpec {
  double speed = 1;               // divides times
  std::int64_t memory_bytes = 0;  // 0 = unlimited
};

// The machine. Bandwidths are GB/s (1e9 bytes); 0 = infinite.
struct Cluster {
  std::vector<DeviceSpec> devices;
  double link_up_gb_per_s = 0;    // host to device, each device
  double link_down_gb_per_s = 0;  // device to host, each device
  double host_gb_per_s = 0;       // shared by every link
  double hop_latency_ms = 0;      // activation or boundary gradient from one device to another
};

// Throw std::invalid_argument naming the field: times, bytes and rates are finite and not negative, speeds positive,
// and there is at least one layer (one device).
void validate(const LayerCosts& costs);
void validate(const Cluster& cluster);

// Times of a stage for one microbatch: the sums over its layers.
double forward_ms(const LayerCosts& costs, Range layers);
double backward_ms(const LayerCosts& costs, Range layers);

}  // namespace roundpipe::schedule
