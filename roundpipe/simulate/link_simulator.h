#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <roundpipe/simulate/simulator.h>

namespace roundpipe::simulate {

// How bytes move and updates are made, beside the cluster's bandwidths.
struct LinkRules {
  schedule::TimingRules timing;           // asynchronous; the others do not apply: every value goes through the host
  std::int64_t chunk_bytes = 64'000'000;  // a transfer is cut into such pieces; 0 = moved whole
  bool priorities = true;                 // activations, boundary gradients, weights, parameter gradients; else FIFO
  int prefetched_values = 2;              // microbatches whose values are uploaded ahead of the one that runs
  // Weight bytes that the host's optimizer updates per second, in 1e9; 0 = at once. One layer at a time, lowest first.
  double update_gb_per_s = 0;
};

enum class TransferKind { kValue, kGradient, kWeights, kParameterGradients };

// One chunk or more of one transfer, as it held its link.
struct TransferEvent {
  int device = 0;
  bool up = true;  // host to device
  TransferKind kind = TransferKind::kValue;
  int step = 0;
  int job = 0;
  double start_ms = 0;
  double end_ms = 0;
};

struct LinkTimeline {
  Timeline timeline;
  std::vector<TransferEvent> transfers;
  double landed_ms = 0;  // when the last gradient is on the host and the last update made
};

// Runs one plan a step with weights, values and gradients moving over each device's two links at the cluster's
// bandwidths, and all links together within the host's.
//
// - The weights of a device's next job are uploaded while one runs (two slots), once the version it reads is published.
// - A value goes from its device to the host and up to the one that needs it, also on the same device.
// - The parameter gradients of a job go down when it has ended; a layer is updated when all of them have landed, and
//   published then.
// - A link sends the chunk of highest priority that is ready, within a priority the one asked for first.
// With infinite bandwidths this is simulate() without hops. Throws std::invalid_argument like simulate().
LinkTimeline simulate_links(std::span<const schedule::Plan> plans, const schedule::LayerCosts& costs,
                            const schedule::Cluster& cluster, const LinkRules& rules);

}  // namespace roundpipe::simulate
