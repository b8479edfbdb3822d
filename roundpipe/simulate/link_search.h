#pragma once

#include <vector>

#include <roundpipe/schedule/search.h>
#include <roundpipe/simulate/link_simulator.h>

namespace roundpipe::simulate {

// One plan for each of `steps` steps: `recipe` with devices. Values take the time of their transfers on idle links.
std::vector<schedule::Plan> place_over_links(const schedule::Plan& recipe, const schedule::LayerCosts& costs,
                                             const schedule::Cluster& cluster, const LinkRules& rules, int steps);

// The best plan found for a machine with bandwidths and, if there is another, the next best, rated by simulate_links.
//
// schedule::search clocks weights and gradients on idle links. Transfers also wait for each other, so this simulates
// a pool of plans that differ: what a search finds, with much traffic and with little, the greedy plan, and even cuts
// that visit each layer once and overlap steps little; then it varies, crosses and polishes the best. More effort than
// the default is spent on more such searches, with other random numbers, which start from the best plans of those
// before. Among plans within 0.1 % of the best, the one with the least traffic comes first, then the least
// interleaving, then the evenest stages. Deterministic.
//
// `options`: its rules, update_gb_per_s and finalists are not used: `rules` says them. Throws like search() and
// simulate_links().
std::vector<schedule::PlanChoice> search_links(const schedule::LayerCosts& costs, const schedule::Cluster& cluster,
                                               const schedule::SearchOptions& options, const LinkRules& rules);

}  // namespace roundpipe::simulate
