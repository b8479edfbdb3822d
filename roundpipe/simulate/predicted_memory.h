#pragma once

#include <cstdint>

namespace roundpipe::simulate {

// Bytes on a device at its peak.
struct DeviceMemory {
  std::int64_t weights = 0;    // of the running stage and of the next one, in one arena that lasts for the step
  std::int64_t gradients = 0;  // parameter gradients, summed on the device
  std::int64_t values = 0;     // what microbatches pass from stage to stage
  std::int64_t work = 0;       // of running layers: saved activations and temporaries
  // Frozen weights that stay there, at most, in room that nothing else needs; 0 on a device without a cap.
  std::int64_t resident = 0;

  std::int64_t total() const { return needed() + resident; }
  // Without what goes first when memory is short.
  std::int64_t needed() const { return weights + gradients + values + work; }
  // Beside all weights: what the engine keeps free for a job, see choose_residents().
  std::int64_t beside_weights() const { return gradients + values + work; }
};

// Bytes of a model and a fused optimizer on the host.
struct HostMemory {
  std::int64_t weights = 0;
  std::int64_t gradients = 0;
  std::int64_t masters = 0;          // what fp32 masters of 16-bit weights take beyond the weights
  std::int64_t moments = 0;          // what the optimizer keeps beside the masters
  std::int64_t moments_on_disk = 0;  // beyond those, and no memory
  std::int64_t masters_on_disk = 0;  // likewise
};

}  // namespace roundpipe::simulate
