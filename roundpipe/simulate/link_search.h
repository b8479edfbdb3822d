#pragma once

#include <vector>

#include <roundpipe/schedule/search.h>
#include <roundpipe/simulate/link_rating.h>

namespace roundpipe::simulate {

// The best plan found for a machine with bandwidths and, if there is another, the next best, rated by simulate_links.
//
// schedule::search clocks weights and gradients on idle links. Transfers also wait for each other, so this simulates
// plans that differ, in rungs from the tightest limits to the caller's: those of the runs of schedule::search_runs. On
// each rung, the pool is what those runs found, the best plans of tighter rungs, the greedy plan, and even cuts that
// visit each layer once, varied by kind; the best are crossed and polished within the limits of the rung. The best
// plans of all rungs are then rated over more steps. A rung does at least the same whatever looser limits there are, so
// allowing replicas, overlap, more gradient groups than one, more fused layers than one or two, or more traffic than
// one of the rungs never gives a worse plan (up to ties, and to what a rating over more steps corrects).
//
// More effort than the default is spent on more such searches, with other random numbers, which start from the best
// plans of those before. Among plans within 0.1 % of the best, the one with the least traffic comes first, then the
// least interleaving, then the evenest stages. Deterministic.
//
// `options`: its rules, update and finalists are not used: `rules` says them. Throws like search() and
// simulate_links().
std::vector<schedule::PlanChoice> search_links(const schedule::LayerCosts& costs, const schedule::Cluster& cluster,
                                               const schedule::SearchOptions& options, const LinkRules& rules);

}  // namespace roundpipe::simulate
