#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <string_view>

#include <c10/core/Device.h>

namespace roundpipe::runtime {

// The rule that makes random layers independent of timing, devices and plans: before layer `layer` runs on
// `microbatch` of pipelined call number `call` (0, 1, ... for each model), the default generators are seeded with
// this value, on recompute too, and put back afterwards. `base_seed` is torch.initial_seed() when the model was
// wrapped.
uint64_t layer_seed(uint64_t base_seed, std::string_view model_name, uint64_t call, int microbatch, int layer);

// What is known of a layer's use of random numbers. Thread safety: any thread.
struct RandomUse {
  enum : int { kUnknown, kNever, kDraws };
  std::atomic<int> state{kUnknown};
};

// Runs `body` with the default generators seeded by `seed`.
//
// The host's default generator belongs to the whole process: a layer that draws from it runs alone among the layers
// of all devices, one known not to draw runs beside others and is watched. A device's own generator is seeded under
// a lock of that device. `watch` = false skips the watching (while the user's thread may be drawing).
// Blocks until the generators are free. `body` may run twice when a layer draws unexpectedly.
void with_seeded_generators(RandomUse& use, uint64_t seed, c10::Device device, bool watch,
                            const std::function<void()>& body);

// Held around a backward pass, which may use the host's generator too: torch.utils.checkpoint seeds it, runs its
// forward again and puts it back. `draws`: a layer of the pass is known to draw, so the pass runs alone.
class BackwardRandomScope {
 public:
  explicit BackwardRandomScope(bool draws);

 private:
  std::shared_lock<std::shared_mutex> beside_;
  std::unique_lock<std::shared_mutex> alone_;
};

}  // namespace roundpipe::runtime
