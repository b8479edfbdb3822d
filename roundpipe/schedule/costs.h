#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <roundpipe/schedule/layer_cost.h>
#include <roundpipe/schedule/plan.h>

namespace roundpipe::schedule {

// One device, as the planner sees it.
struct ClusterDevice {
  double speed = 1;               // divides times
  std::int64_t memory_bytes = 0;  // 0 = unlimited
  // Room beside everything else for frozen weights that stay from visit to visit; 0 = none stay.
  std::int64_t resident_bytes = 0;
};

// The machine. Bandwidths are GB/s (1e9 bytes); 0 = infinite.
struct Cluster {
  std::vector<ClusterDevice> devices;
  double link_up_gb_per_s = 0;    // host to device, for each device
  double link_down_gb_per_s = 0;  // device to host, for each device
  double host_gb_per_s = 0;       // of the host's memory, shared by all links and the optimizer's updates
  double hop_latency_ms = 0;      // of an activation or boundary gradient from one device to another
  // The devices' work, the links' and the updates are done by the same cores, as with virtual devices: their times add
  // up.
  bool on_host_cores = false;
};

// The host's optimizer, as plans see it. It updates one layer at a time.
struct UpdateRate {
  // Weights that it updates while nothing else uses the host's memory, in 1e9 bytes per second; 0 = infinite.
  double gb_per_s = 0;
  // Bytes of the host's memory that it reads and writes for each byte of these weights, see optim::update_traffic.
  // They share Cluster::host_gb_per_s with the links; 0 = they are not counted.
  double traffic = 0;
};

// Throw std::invalid_argument, naming the field, unless times, bytes and rates are finite and not negative, speeds are
// positive, and there is at least one layer (one device).
void validate(const LayerCosts& costs);
void validate(const Cluster& cluster);
void validate(const UpdateRate& update);

// Layers with the same bytes, of which the slowest takes at most `within` more than the fastest, get their mean times:
// measured times of equal layers differ by chance, and a search would plan for the differences. Forward and backward
// are averaged each by itself; a recompute_ms that is set stays.
void average_alike(LayerCosts& costs, double within);

// Memory of the largest device; 0 = unlimited. No stage can be larger; a Placer knows where smaller ones fit.
std::int64_t largest_room_bytes(const Cluster& cluster);

// The frozen weights that each device keeps: those of every layer that it meets, from then on, as long as it has room.
// Once the room is taken, nothing changes any more, as on the engine's devices (runtime::ResidentWeights).
class KeptWeights {
 public:
  KeptWeights(const LayerCosts& costs, const Cluster& cluster);

  // Whether anything can be kept anywhere.
  bool any() const { return !kept_.empty(); }
  // Of the weights of `layers`, what `device` need not upload.
  std::int64_t kept_bytes(Range layers, int device) const;
  // `device` has uploaded the weights of `layers`.
  void meet(Range layers, int device);

 private:
  std::size_t at(int layer, int device) const {
    return static_cast<std::size_t>(device) * frozen_.size() + static_cast<std::size_t>(layer);
  }
  std::vector<std::int64_t> frozen_;  // [layer]
  std::vector<std::int64_t> room_;    // [device]: what is left
  std::vector<char> kept_;            // [device, layer]; empty if nothing can be kept
};

// Sums costs over consecutive layers in constant time.
class CostSums {
 public:
  // Backward times and gradients count from `first_backward_layer` up. A backward visit that ends at the layer
  // `single_below` or lower has one layer.
  explicit CostSums(const LayerCosts& costs, int first_backward_layer = 0, int single_below = 0);

  int layers() const { return static_cast<int>(forward_.size()) - 1; }
  // Times are for one microbatch on a device of speed 1.
  double forward_ms(Range layers) const { return between(forward_, layers); }
  double recompute_ms(Range layers) const { return between(recompute_, layers); }
  double backward_ms(Range layers) const { return between(backward_, layers); }
  std::int64_t weight_bytes(Range layers) const { return between(weight_, layers); }
  std::int64_t gradient_bytes(Range layers) const { return between(gradient_, layers); }
  // What a backward visit downloads for the parameters. `whole`: it has all microbatches of a step.
  std::int64_t sent_gradient_bytes(Range layers, bool whole) const;
  // Of these, what leaves when the last backward of `layer` is over, before those of the layers below it.
  std::int64_t leaving_gradient_bytes(int layer, Range layers, bool whole) const;
  std::int64_t saved_bytes(Range layers) const { return between(saved_, layers); }
  // What a layer gets from the one before, one microbatch; 0 for the first, whose inputs are the model's.
  std::int64_t input_bytes(int layer) const { return layer > 0 ? activation_[static_cast<std::size_t>(layer) - 1] : 0; }

  // Whether a backward of these layers sums gradients.
  bool trains(Range layers) const { return between(trained_, layers) > 0; }

  // Device memory of a visit: its weights, the prefetched weights of the next visit (assumed equally large), two
  // boundary values in and two out and, if it goes backward, gradients and one microbatch's saved activations.
  // `least`: without the weights of the next visit.
  std::int64_t visit_bytes(Range layers, bool backward, bool least = false) const;
  // Whether a stage may have these layers, wherever it fits.
  bool may_be_stage(Range layers, bool backward) const {
    return !backward || layers.size() == 1 || layers.last > single_below_;
  }
  // Whether a visit is that of a possible stage and fits `room_bytes` (0 = unlimited). A single layer may do without
  // the weights of the next visit.
  bool fits(Range layers, bool backward, std::int64_t room_bytes) const {
    return may_be_stage(layers, backward) &&
           (room_bytes == 0 || visit_bytes(layers, backward, layers.size() == 1) <= room_bytes);
  }

 private:
  template <typename T>
  static T between(const std::vector<T>& sums, Range layers) {
    return sums[static_cast<std::size_t>(layers.last)] - sums[static_cast<std::size_t>(layers.first)];
  }

  std::vector<double> forward_, recompute_, backward_;
  std::vector<std::int64_t> weight_, gradient_, partial_sum_, saved_, activation_;
  std::vector<int> trained_;
  std::vector<std::pair<int, JoinedGradients>> joined_;  // with the first layer
  int single_below_;
};

}  // namespace roundpipe::schedule
