#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <roundpipe/runtime/call/execution_log.h>
#include <roundpipe/runtime/model/model_state.h>
#include <roundpipe/schedule/costs.h>

namespace roundpipe::runtime {

// The costs of a model's layers, learned from executed calls: smoothed, for one microbatch on a device of speed 1, and
// the speeds of the devices, from the times of the same layer on several of them. If layers are not timed one by one
// (LayerTime), a stage's time is divided among them in proportion to the current estimates, so that different cuts
// refine the estimates. Thread safety: one thread at a time.
class CostMeter {
 public:
  // `model` outlives the meter.
  explicit CostMeter(const ModelState& model);

  // The bytes that each layer holds per microbatch from its forward to its backward, and the bytes of its outputs;
  // they count from now on instead of the bytes that calls have shown.
  void set_bytes(std::vector<int64_t> saved_bytes, std::vector<int64_t> activation_bytes);

  // What one call has measured.
  void add(const std::vector<ExecutionRecord>& records, const std::vector<LayerTime>& times = {});
  // The pool has other devices from now on, of unknown speeds.
  void forget_devices() { device_ms_.clear(); }

  // Whether the forward of every layer (and the backward, if `backward`) has been measured in at least `calls` calls.
  bool knows(bool backward, int calls) const;
  schedule::LayerCosts costs() const;
  // The speed of each of `devices` devices, relative to the fastest. Speeds that differ by less than a tenth, or by
  // less than the times of single layers vary, are all 1, and so is that of a device that has not been compared.
  std::vector<double> speeds(int devices) const;

 private:
  struct Layer {
    double forward_ms;
    double backward_ms;
    int forward_calls = 0;
    int backward_calls = 0;
    bool backward_clocked = false;
    int64_t output_bytes = 0;
  };
  // The smoothed time of one layer and direction on one device.
  struct Smoothed {
    double ms = 0;
    int calls = 0;
  };
  double forward_ms(schedule::Range layers) const;
  void add_layers(const std::vector<LayerTime>& times, const std::vector<double>& speeds);

  const ModelState& model_;
  std::vector<Layer> layers_;
  std::vector<int64_t> weight_bytes_;
  // Per layer; empty = unknown.
  std::vector<int64_t> saved_bytes_;
  std::vector<int64_t> activation_bytes_;
  std::map<std::pair<int, bool>, std::map<int, Smoothed>> device_ms_;  // [layer, backward][device]
};

}  // namespace roundpipe::runtime
