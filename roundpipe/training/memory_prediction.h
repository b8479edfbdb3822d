#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/training/host_memory.h>

namespace roundpipe {

// Where a layer's activations are between its forward and its backward.
enum class Activations {
  kDevice,     // the layer keeps them
  kHost,       // its inputs wait there, and it is recomputed from them
  kRecompute,  // from a layer below
};

// The predicted memory of a model's step, in bytes.
struct MemoryPrediction {
  // On the device with the highest peak, at that peak.
  simulate::DeviceMemory device;
  // The highest peak of any device since; unset until a step has run.
  std::optional<int64_t> measured_bytes = std::nullopt;
  // The model and its fused optimizer or, before there is one, a fused Adam with fp32 moments.
  HostPrediction host;
  RecomputeGrain recompute_grain = RecomputeGrain::kStage;
  std::vector<Activations> activations;  // of each layer

  // A table of all of it.
  std::string text() const;
};

}  // namespace roundpipe
