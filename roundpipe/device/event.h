#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace roundpipe::device {

// A one-shot completion: pending, then fired or failed, for good.
//
// It fires when the work is really done (on accelerators: when the device has passed that point), so whoever saw it
// fire may touch the memory from any thread or queue.
// Thread safety: every method from any thread. Callbacks run on the completing thread, without the lock, and must
// not block or throw.
class Event {
 public:
  using Callback = std::function<void()>;

  void fire();
  // Does nothing when the event is complete already, so the first error wins.
  void fail(std::exception_ptr error);

  bool complete() const;
  // The error it failed with; null while pending or when it fired.
  std::exception_ptr error() const;

  // Blocks until complete; rethrows the error of a failed event.
  void wait() const;
  // Blocks until complete, failed or not.
  void wait_complete() const;
  // Blocks at most `timeout_ms`; true when complete. Never throws the event's error.
  bool wait_for(double timeout_ms) const;

  // Runs `callback` once complete: at once on this thread if it is already.
  void then(Callback callback);

  // Clock::now_ms() of completion; 0 while pending.
  double time_ms() const;

 private:
  enum class State { kPending, kFired, kFailed };
  void finish(State state, std::exception_ptr error);

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  // Protected by mutex_.
  State state_ = State::kPending;
  std::exception_ptr error_;
  double time_ms_ = 0;
  std::vector<Callback> callbacks_;
};

using EventPtr = std::shared_ptr<Event>;

inline EventPtr make_event() { return std::make_shared<Event>(); }

// An event that has fired.
EventPtr fired_event();

// Runs `callback` when every event is complete (failed ones too). Null events count as complete.
void when_all(const std::vector<EventPtr>& events, Event::Callback callback);

// `hook` runs before an event completes, on the completing thread: a test can delay any of them. Null = none. Set while
// nothing is running.
void set_completion_hook(std::function<void()> hook);

// Blocks until complete, calling the process-wide interrupt check (see set_interrupt_check) every 50 ms;
// rethrows what the check throws, else the event's error.
void wait_interruptible(const Event& event);

// `check` may throw to abandon a wait (the Python package raises KeyboardInterrupt). Set once, before any wait.
void set_interrupt_check(std::function<void()> check);

}  // namespace roundpipe::device
