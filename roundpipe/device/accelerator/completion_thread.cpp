#include <roundpipe/device/accelerator/completion_thread.h>

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <exception>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/engine_life.h>

namespace roundpipe::device {

double StreamClock::passed_ms(double recorded_ms, double noticed_ms, std::optional<double> since_last_ms) {
  double passed_ms = noticed_ms;
  if (last_ms_ && since_last_ms) passed_ms = std::min(*last_ms_ + *since_last_ms, noticed_ms);
  passed_ms = std::max({passed_ms, recorded_ms, last_ms_.value_or(recorded_ms)});
  last_ms_ = passed_ms;
  return passed_ms;
}

namespace {

// Chooses events with times, if the stream can give them.
c10::EventFlag flag_for(const c10::Stream& stream, bool timed) {
  if (!timed) return c10::EventFlag::PYTORCH_DEFAULT;
  try {
    c10::Event first(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);
    c10::Event second(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);
    first.record(stream);
    second.record(stream);
    second.synchronize();
    static_cast<void>(first.elapsedTime(second));
    return c10::EventFlag::BACKEND_DEFAULT;
  } catch (const std::exception&) {
    return c10::EventFlag::PYTORCH_DEFAULT;
  }
}

// Polls instead of using the event's own wait, which spins: each queue would take a core from the host's optimizers.
void wait(const c10::Event& recorded) {
  constexpr Clock::duration kShortest = std::chrono::microseconds(10);
  constexpr Clock::duration kLongest = std::chrono::microseconds(100);
  const Clock::time_point start = Clock::now();
  while (!recorded.query()) {
    std::this_thread::sleep_for(std::clamp((Clock::now() - start) / 16, kShortest, kLongest));
  }
}

}  // namespace

CompletionThread::CompletionThread(c10::Stream stream, bool timed)
    : stream_(stream), flag_(flag_for(stream, timed)), thread_([this] { run(); }) {}

CompletionThread::~CompletionThread() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::unique_ptr<c10::Event> CompletionThread::take() {
  {
    const MutexLock lock(mutex_);
    if (!spare_.empty()) {
      std::unique_ptr<c10::Event> spare = std::move(spare_.back());
      spare_.pop_back();
      return spare;
    }
  }
  return std::make_unique<c10::Event>(stream_.device_type(), flag_);
}

void CompletionThread::watch(EventPtr event) {
  Pending pending{take(), now_ms(), std::move(event)};
  pending.recorded->record(stream_);
  {
    const MutexLock lock(mutex_);
    pending_.push_back(std::move(pending));
  }
  changed_.notify_all();
}

double CompletionThread::passed_ms(const Pending& now) {
  const double noticed_ms = now_ms();
  std::optional<double> since_last_ms;
  if (last_) {
    try {
      since_last_ms = last_->elapsedTime(*now.recorded);
    } catch (const std::exception&) {
      // The point is passed, only its time is unknown.
    }
  }
  return clock_.passed_ms(now.recorded_ms, noticed_ms, since_last_ms);
}

void CompletionThread::run() {
  become_engine_thread();
  // Destroying an event switches to its device and back to the current one. They must be the same, or this thread
  // would make a context on the first card.
  c10::impl::VirtualGuardImpl(stream_.device_type()).uncheckedSetDevice(stream_.device());
#ifdef PR_SET_TIMERSLACK
  prctl(PR_SET_TIMERSLACK, 1000UL);  // ns; by default, sleeps last 50 us longer than requested
#endif
  while (true) {
    Pending next;
    {
      const MutexLock lock(mutex_);
      while (!stopping_ && pending_.empty()) changed_.wait(mutex_);
      if (pending_.empty()) {
        spare_.clear();
        last_.reset();
        return;
      }
      next = std::move(pending_.front());
      pending_.pop_front();
    }
    double passed = 0;
    try {
      wait(*next.recorded);
      passed = passed_ms(next);
    } catch (...) {
      next.event->fail(std::current_exception());
      continue;
    }
    // Recycle before firing: whoever waits for the event may need the next one.
    std::unique_ptr<c10::Event> spare = std::move(next.recorded);
    if (flag_ == c10::EventFlag::BACKEND_DEFAULT) spare.swap(last_);
    if (spare) {
      const MutexLock lock(mutex_);
      spare_.push_back(std::move(spare));
    }
    next.event->fire_at(passed);
  }
}

}  // namespace roundpipe::device
