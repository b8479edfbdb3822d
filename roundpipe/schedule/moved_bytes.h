#pragma once

#include <roundpipe/schedule/costs.h>
#include <roundpipe/schedule/plan.h>

namespace roundpipe::schedule {

// What one step moves over all links, and what the host's optimizer updates after it.
struct MovedBytes {
  double up = 0;       // weights of each job, inputs of stages, boundary gradients
  double down = 0;     // boundary values, each once; boundary gradients; parameter gradients or sums of each job
  double updated = 0;  // weights that train
};

// REQUIRES: a valid plan for these costs.
MovedBytes moved_bytes(const Plan& plan, const LayerCosts& costs, const CostSums& sums);

// Whether any bandwidth of the cluster is finite.
bool has_rates(const Cluster& cluster);

// A bound from below on the time of a step, and what sets it: "links up", "links down", "host memory" or "optimizer".
struct LeastTime {
  double ms = 0;
  const char* limit = "";
};

// The time to move `moved` over links that share the load evenly, to update at the optimizer's rate, and for both
// through the host's memory. Rates of 0 are infinite.
LeastTime least_time(const MovedBytes& moved, const Cluster& cluster, const UpdateRate& update);

// The time of all transfers and updates one after another.
double time_in_turn_ms(const MovedBytes& moved, const Cluster& cluster, const UpdateRate& update);

// Milliseconds that a value takes from one device to another by way of the host, on links that move nothing else: the
// largest boundary value of `costs`, down and up.
double hop_ms(const LayerCosts& costs, const Cluster& cluster);

}  // namespace roundpipe::schedule
