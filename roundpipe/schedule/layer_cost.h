#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace roundpipe {

// The gradients of weights that a layer shares with later ones. A job that has all of these layers, and all
// microbatches of a step, adds up their sums and sends one, rounded.
struct JoinedGradients {
  int last_layer = 0;        // of those that share them; 0: none does
  std::int64_t saved = 0;    // bytes that such a job sends less than one for each of its layers would
  std::int64_t rounded = 0;  // of that one, in separate memory

  // `first_layer`: the layer whose entry this is.
  constexpr bool holds(int first_layer, int job_first, int job_last) const {
    return last_layer > 0 && job_first <= first_layer && last_layer < job_last;
  }
};

namespace schedule {

// The costs of one layer. Times are for one microbatch on a device of speed 1.
struct LayerCost {
  double forward_ms = 0;
  double backward_ms = 0;                             // without the recompute
  std::int64_t weight_bytes = 0;                      // uploaded on each visit
  std::int64_t gradient_bytes = 0;                    // downloaded after a backward visit
  std::int64_t activation_bytes = 0;                  // the layer's output, one microbatch
  std::int64_t saved_bytes = 0;                       // kept on the device from forward to backward, one microbatch
  std::optional<double> recompute_ms = std::nullopt;  // the recompute before the backward; if unset, forward_ms
  bool trained = true;                                // false for a frozen layer, which has no sums of gradients
  // Downloaded instead of gradient_bytes by each of several devices that share a visit: sums that are not rounded yet.
  // If unset, twice gradient_bytes, as for 16-bit gradients with sums in fp32.
  std::optional<std::int64_t> partial_sum_bytes = std::nullopt;
  JoinedGradients joined = {};  // of weights that this layer is the first to have, and others share
  // Of weight_bytes: weights that no step changes, which a device may keep from visit to visit.
  std::int64_t frozen_bytes = 0;

  // The weights that the optimizer updates: those that have gradients, of an adapter a small part of the layer.
  std::int64_t updated_bytes() const { return weight_bytes < gradient_bytes ? weight_bytes : gradient_bytes; }
};

using LayerCosts = std::vector<LayerCost>;

}  // namespace schedule
}  // namespace roundpipe
