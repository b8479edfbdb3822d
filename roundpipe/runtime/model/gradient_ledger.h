#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <roundpipe/runtime/model/model_state.h>

namespace roundpipe::runtime {

// Who holds a model's gradients: the engine, summed in blocks since the last step (ModelState::gradients), or the user,
// in the parameters' `.grad`. This class moves them between the two. What autograd leaves in `.grad` beside sums that
// are not shown, for code outside of the layers that uses a parameter (a penalty, a head on tied weights), counts with
// them.
// Thread safety: the caller's thread.
class GradientLedger {
 public:
  // `model` outlives this.
  explicit GradientLedger(ModelState& model) : model_(model) {}

  // Whether there are gradients that no step has taken, from calls that are over or in flight.
  bool any() const;
  // Moves `.grad` back into the engine's sums: gradients that show() put there, which the user may have cleared or
  // changed, or what lies beside the sums. Waits for a sum that is in flight if its block's parameters have a `.grad`.
  void import();
  // Adds what lies beside sums that are not shown to them, as the next call would.
  void gather() {
    if (!shown_ && any()) import();
  }
  // Imports, then returns the sums: one entry for each block, null where there is none. The next calls start new ones.
  std::vector<memory::GradientBlockPtr> take();
  // Drops the sums and every `.grad`, without waiting for gradients in flight.
  void drop();
  // Puts the sums, with what lies beside them, into `.grad`, in the parameters' own dtypes. REQUIRES: no call is
  // running.
  void show();
  // Whether show() has put the sums into `.grad`, where the user may have changed or cleared them.
  bool shown() const { return shown_; }
  // The sums that are in the engine alone: for each block and parameter, undefined where there is none.
  // REQUIRES: no call is running.
  std::vector<std::vector<at::Tensor>> summed() const;
  // Replaces the sums by copies of these values, in the form of summed(). Where a backward shows its gradients at once,
  // these are shown as well: a plain loop clears `.grad`, also what a step before the save left there.
  // REQUIRES: no call is running.
  void load(const std::vector<std::vector<at::Tensor>>& gradients);

  // Whether `.grad` is to show gradients as soon as a backward ends, as in a plain PyTorch loop.
  bool shows_at_once() const { return shows_at_once_; }
  void set_shows_at_once(bool shows) { shows_at_once_ = shows; }

 private:
  // Whether every `.grad` of a block's parameters is unchanged since show(). `first`: the number of the block's first
  // parameter, counted over all blocks.
  bool are_as_shown(size_t first, const std::vector<memory::NamedTensor>& parameters) const;

  ModelState& model_;
  bool shown_ = false;
  std::vector<std::pair<at::Tensor, uint32_t>> shown_gradients_;  // with their versions
  bool shows_at_once_ = false;
};

}  // namespace roundpipe::runtime
