#pragma once

#include <cmath>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include <roundpipe/memory/gradient_block.h>
#include <roundpipe/optim/block_optimizer.h>
#include <roundpipe/runtime/step/update_thread.h>

namespace roundpipe::runtime {

// The norm of the gradients of blocks, of each of which `squares` are the terms. In block order, not in the order of
// arrival, so that the sum has the same bits every time.
template <typename Blocks>
float norm_of_squares(const Blocks& blocks) {
  double squares = 0;
  for (const auto& block : blocks) squares += block.squares.empty() ? 0 : block.optimizer->total(block.squares);
  return static_cast<float>(std::sqrt(squares));
}

// Measures gradients and drops them, each block's as they land, so that the next ones have their room. Nothing else
// changes: neither weights nor the state of their optimizers.
//
// The norm has the bits of that of a step with the same gradients. Fails if the call of some gradients failed.
// Thread safety: start() once; waiting and reading from any thread.
class GradientMeasurement : public std::enable_shared_from_this<GradientMeasurement> {
 public:
  struct Block {
    const optim::BlockOptimizer* optimizer = nullptr;
    const memory::BlockLayout* layout = nullptr;
    size_t layer = 0;  // see BlockStep
    memory::GradientBlockPtr gradients;

    // Used by GradientMeasurement only.
    std::vector<double> squares;
    UpdateThread::Work work;
  };

  // `number`: among those of steps. `owner` keeps the optimizers and layouts alive.
  GradientMeasurement(uint64_t number, std::vector<Block> blocks, std::shared_ptr<void> owner);

  void start();

  // Fires when all gradients have been measured and dropped; fails if some could not be measured.
  const device::EventPtr& finished() const { return finished_; }
  // REQUIRES: finished.
  float norm() const { return norm_; }

 private:
  void hand_in(Block& block) noexcept;
  void measure(Block& block);

  const uint64_t number_;
  std::vector<Block> blocks_;
  std::shared_ptr<void> owner_;
  const device::EventPtr finished_ = device::make_event();
  // Used by the update thread, until finished_ has fired.
  size_t to_measure_;
  std::exception_ptr error_;  // the first
  float norm_ = 0;
};

}  // namespace roundpipe::runtime
