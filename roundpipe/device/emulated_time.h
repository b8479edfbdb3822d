#pragma once

#include <thread>

#include <roundpipe/core/clock.h>

namespace roundpipe::device {

// Spends the time that work would take, without doing the work. Used by one thread.
class EmulatedTime {
 public:
  // Blocks for `duration_ms`. If the previous work has only just ended, the time counts from its end, so that the
  // wake-up delays of work back to back do not add up.
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
