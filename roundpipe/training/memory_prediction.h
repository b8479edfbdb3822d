#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <roundpipe/core/error.h>
#include <roundpipe/schedule/plan.h>
#include <roundpipe/simulate/predicted_memory.h>

namespace roundpipe {

// A model or a step does not fit what the user has given it.
class ROUNDPIPE_API BudgetExceeded : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Bytes of a model's training on the host.
struct HostPrediction : simulate::HostMemory {
  int64_t values = 0;             // that wait between stages until their backward; 0 before a batch is known
  int64_t partial_sums = 0;       // of gradients, beyond these: of layers that share a parameter or a device
  int64_t kept_for_failures = 0;  // to run jobs again (RunOptions: fault_tolerant, verify_every), at most

  int64_t total() const { return weights + gradients + masters + moments + values + partial_sums + kept_for_failures; }
};

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

// -- for the training --

using MemoryRows = std::vector<std::pair<std::string, int64_t>>;
MemoryRows rows_of(const HostPrediction& host);
MemoryRows rows_of(const simulate::DeviceMemory& device);
// Sizes one below the other, then their sum, and the sizes to compare it with. Rows of 0 are left out.
std::string memory_table(const std::string& title, const MemoryRows& rows, const MemoryRows& beside);

}  // namespace roundpipe
