#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include <c10/core/Device.h>

#include <roundpipe/torch_compat/own_generators.h>

namespace roundpipe::runtime {

// The rule that makes random layers independent of timing, devices and plans: before layer `layer` runs on
// `microbatch` of pipelined call number `call` (0, 1, ... for each model), what it draws from is seeded with this
// value, on recompute too. `base_seed` is torch.initial_seed() when the model was wrapped.
uint64_t layer_seed(uint64_t base_seed, std::string_view model_name, uint64_t call, int microbatch, int layer);

// What the layer's backward draws from is seeded with, when its gradient arrives: layer_seed() mixed once more.
uint64_t backward_seed(uint64_t forward_seed);

// What is known of a layer's draws from the default generator of a card, which only operators without a generator
// argument make (see torch_compat::OwnGenerators). On virtual devices there are none. Thread safety: any thread.
struct SharedDraws {
  enum : int { kUnknown, kNotInForward, kNever, kSome };
  std::atomic<int> state{kUnknown};

  // Whether the caller has to be kept from drawing while such a layer may run.
  bool possible(bool with_backward) const {
    const int known = state.load();
    return known != kNever && (known != kNotInForward || with_backward);
  }
};

// Runs `body`, the forward of a layer on `device`, with `own`, the generators of this thread, seeded by `seed`.
//
// On a card whose default generator the layer draws from, or is not known not to, it runs under a lock of that card,
// and what that generator held before is put back: REQUIRES that the user's threads do not draw there meanwhile.
// Blocks until the lock is free, after `before_lock`. `body` may run twice, when a layer turns out to draw from it.
void run_seeded(torch_compat::OwnGenerators& own, SharedDraws& draws, uint64_t seed, c10::Device device,
                const std::function<void()>& body, const std::function<void()>& before_lock = nullptr);

// Runs `body`, a backward pass through layers with these `draws`, by the same rule. Throws Error when something there
// drew from the card's default generator that does so in no forward.
void run_backward(torch_compat::OwnGenerators& own, const std::vector<SharedDraws*>& draws, uint64_t seed,
                  c10::Device device, const std::function<void()>& body);

}  // namespace roundpipe::runtime
