#pragma once

#include <cstdint>
#include <vector>

#include <roundpipe/schedule/search_runs.h>

namespace roundpipe::schedule {

// Returns the best plans found, best first. Their cuts differ, and there is at least one.
//
// Weights and gradients take their time on idle links (Progress), and all transfers together at least the least time at
// the cluster's bandwidths; simulate::search_links simulates them.
//
// The search consists of runs, from the tightest limits to the caller's: without replicas (two streams of random
// numbers), then with traffic of at most 1, 1.25 and 2 and the caller's max_traffic; each with one gradient group and
// the caller's, without and with overlap of steps, with one fused layer, two, and the caller's most. A run spends a
// fixed part of the effort and starts from the best plans of tighter ones. So allowing replicas, overlap, more gradient
// groups than one, more fused layers than one or two, or more traffic than one of these rungs never gives a worse plan
// (up to ties). Runs are left out where no device idles already. More effort than the default is spent on more such
// searches, with other random numbers, so it never gives a worse plan than the default.
//
// In a run, coordinate descent varies the number of stages, the number of one-layer stages at both ends, the replicas
// at both ends and of the fused stage, and the interleaving; exact partitions cut the layers in between. Annealing then
// changes single stages, for models whose layers differ. The greedy plan, with its fused stage limited to
// max_fused_layers, is a candidate, so the best plan is no slower if the greedy one keeps the limits. A cut for which a
// device has no room beside its running job (Placer::crowded) is impossible. Ties go by settle_ties().
// Deterministic.
// Throws LayerTooLarge with the layer's number, and std::invalid_argument for bad costs, cluster or options and for
// limits that no plan keeps.
std::vector<PlanChoice> search(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options);

}  // namespace roundpipe::schedule
