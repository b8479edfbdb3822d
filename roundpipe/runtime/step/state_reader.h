#pragma once

namespace roundpipe::runtime {

// Somebody who reads a block's weights and optimizer state as one step left them, while training goes on: a checkpoint.
// Given to ModelOptimizer::set_reader after that step has begun, and told before the next one changes anything.
class StateReader {
 public:
  virtual ~StateReader() = default;

  // Caller's thread, when the next step begins or the caller waits for all steps: calls will no longer read the weights
  // that they have read until now, so their memory may be reused once this returns. May block, and throw what
  // interrupts the wait; then nothing has changed, and this is called again.
  virtual void before_step() = 0;
  // Update thread, before the next step changes the block; may block. Once.
  virtual void before_update() noexcept = 0;
};

}  // namespace roundpipe::runtime
