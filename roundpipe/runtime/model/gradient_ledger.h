#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <roundpipe/runtime/model/model_state.h>

namespace roundpipe::runtime {

// Who has a model's gradients: the engine, summed in blocks since the last step (ModelState::gradients), or the user,
// in the parameters' `.grad`. They are handed back and forth here.
// Thread safety: the caller's thread.
class GradientLedger {
 public:
  // `model` outlives this.
  explicit GradientLedger(ModelState& model) : model_(model) {}

  // Whether calls have left gradients, or will, that no step has taken.
  bool any() const;
  // Takes back what the user has in `.grad`: the engine's sums as shown, cleared or changed ones, or the user's own.
  void import();
  // The sums, one entry for each block, null where there are none; the next calls begin new ones.
  std::vector<memory::GradientBlockPtr> take();
  // Drops the sums and what is in `.grad`, without waiting for gradients that are on their way.
  void drop();
  // Puts what has been summed into `.grad`, in the parameters' own types. REQUIRES: no call is running.
  void show();

  // Whether `.grad` is to show gradients as soon as a backward is over, as it does in a plain PyTorch loop.
  bool shows_at_once() const { return shows_at_once_; }
  void set_shows_at_once(bool shows) { shows_at_once_ = shows; }

 private:
  // Whether the .grads of a block's parameters, whose first is number `first` of all, are untouched since show().
  bool are_as_shown(size_t first, const std::vector<memory::NamedTensor>& parameters) const;

  ModelState& model_;
  bool shown_ = false;
  std::vector<std::pair<at::Tensor, uint32_t>> shown_gradients_;  // with their versions
  bool shows_at_once_ = false;
};

}  // namespace roundpipe::runtime
