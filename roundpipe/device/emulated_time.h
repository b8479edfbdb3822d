#pragma once

#include <thread>

#include <roundpipe/core/clock.h>

namespace roundpipe::device {

// Work that takes a given time instead of being done. Used by one thread.
class EmulatedTime {
 public:
  // Blocks for `duration_ms`, counted from the end of the work before where that is just over: against one running
  // deadline, so that wake-up delays of back-to-back pieces do not add up.
  void spend(double duration_ms) {
    constexpr double kContinuous_ms = 1.0;
    const Clock::time_point now = Clock::now();
    const Clock::time_point start = now - until_ < from_ms(kContinuous_ms) ? until_ : now;
    until_ = start + from_ms(duration_ms);
    std::this_thread::sleep_until(until_);
  }

 private:
  Clock::time_point until_{};
};

}  // namespace roundpipe::device
