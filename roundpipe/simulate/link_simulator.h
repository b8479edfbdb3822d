#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <roundpipe/schedule/priority.h>
#include <roundpipe/simulate/node_exchange.h>
#include <roundpipe/simulate/simulator.h>

namespace roundpipe::simulate {

// The rules for transfers and updates, besides the cluster's bandwidths.
struct LinkRules {
  schedule::TimingRules timing;           // only `asynchronous` applies: every value goes by way of the host
  std::int64_t chunk_bytes = 64'000'000;  // transfers are cut into chunks of this size; 0 = not cut
  bool priorities = true;                 // by schedule::Priority, as the engine's links do; else FIFO
  int prefetched_values = 2;              // microbatches whose values are prefetched, counting the running one
  schedule::UpdateRate update;            // one layer at a time, lowest first
  NodeRules nodes;                        // of the machines that train together; each runs the same plans
};

// The time that a transfer occupied its link: one or more chunks without a break.
struct TransferEvent {
  int device = 0;
  bool up = true;  // host to device
  schedule::Priority kind = schedule::Priority::kActivation;
  int step = 0;
  int job = 0;
  double start_ms = 0;
  double end_ms = 0;
};

struct LinkTimeline {
  Timeline timeline;
  std::vector<TransferEvent> transfers;
  double landed_ms = 0;        // when the last gradient has landed and the last update is done, on every node
  double network_busy_ms = 0;  // of a node's network, in each direction
};

// Runs one plan per step. Weights, values and gradients move over the two directions of each device's link at the
// cluster's bandwidths. All busy links and the update under way share the host's bandwidth evenly, as fair_share()
// says: each gets no more than its own rate, and leaves to the others what it cannot use.
//
// - The weights of a device's next job are uploaded while the current one runs (two slots), layer by layer, once the
//   version that the job reads is published; not those that it keeps (schedule::KeptWeights). A job's first microbatch
//   enters each layer when the weights of that layer are there.
// - A value goes to the host and from there to the device that needs it, even if that is the same device.
// - The parameter gradients of a layer are downloaded when the job's last microbatch has gone back through it. When all
//   gradients of a layer have landed, the layer is updated and then published; among several nodes, as NodeExchange
//   says.
// - A link sends the waiting chunk of highest priority; within a priority, the transfer requested first.
// With infinite bandwidths, the result is that of simulate() without hops. Throws std::invalid_argument like
// simulate(), and for rules out of range.
LinkTimeline simulate_links(std::span<const schedule::Plan> plans, const schedule::LayerCosts& costs,
                            const schedule::Cluster& cluster, const LinkRules& rules);

}  // namespace roundpipe::simulate
