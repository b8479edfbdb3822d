#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <c10/core/Device.h>

#include <roundpipe/torch_compat/own_generators.h>

namespace roundpipe::runtime {

// The rule that makes random layers independent of timing, devices and plans: before layer `layer` runs on `microbatch`
// of pipelined call number `call` (0, 1, ... for each model), its generators are seeded with this value, also for a
// recompute. `base_seed` is torch.initial_seed() when the model was wrapped.
uint64_t layer_seed(uint64_t base_seed, std::string_view model_name, uint64_t call, int microbatch, int layer);

// The seed of the generators for the layer's backward, set when its gradient arrives: layer_seed() mixed once more.
uint64_t backward_seed(uint64_t forward_seed);

// Whether a layer draws from the default generator of a card, which only operators without a generator argument do (see
// torch_compat::OwnGenerators). Virtual devices have no such draws. Thread safety: any thread.
struct SharedDraws {
  enum : int { kUnknown, kNotInForward, kNever, kSome };
  std::atomic<int> state{kUnknown};

  // Whether the caller must be kept from drawing while such a layer may run.
  bool possible(bool with_backward) const {
    const int known = state.load();
    return known != kNever && (known != kNotInForward || with_backward);
  }
};

// Runs `body`, the forward of a layer on `device`, after seeding `own`, the generators of this thread, with `seed`.
//
// If the layer draws from the card's default generator, or is not known not to, it runs under a lock of that card, and
// the generator's state is restored afterwards. REQUIRES: the user's threads do not draw there meanwhile. Calls
// `before_lock`, then blocks until the lock is free. `body` runs twice if the layer turns out to draw from it.
void run_seeded(torch_compat::OwnGenerators& own, SharedDraws& draws, uint64_t seed, c10::Device device,
                const std::function<void()>& body, const std::function<void()>& before_lock = nullptr);

// Runs `body`, a backward pass over layers with these `draws`, by the same rule. Throws Error if the pass drew from the
// card's default generator although no forward of these layers does.
void run_backward(torch_compat::OwnGenerators& own, const std::vector<SharedDraws*>& draws, uint64_t seed,
                  c10::Device device, const std::function<void()>& body);

class BorrowedGenerator;

// While it lives, its thread draws from generators of its own, for layers that run outside of a call on `device`, and
// what they draw from the default generator of a card is undone at the end. Blocks, with the lock of that card held
// from then on, until no other thread draws there. Must not be moved.
class DrawsApart {
 public:
  DrawsApart(uint64_t seed, c10::Device device);
  ~DrawsApart();
  DrawsApart(const DrawsApart&) = delete;
  DrawsApart& operator=(const DrawsApart&) = delete;

 private:
  std::unique_ptr<BorrowedGenerator> borrowed_;  // null: the host has no such draws
  std::optional<torch_compat::OwnGenerators::Scope> own_;
};

}  // namespace roundpipe::runtime
