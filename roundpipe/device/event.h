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
//
// Callbacks run on the completing thread, without the lock, and must not block. Each runs whatever those before it do.
// One that can throw (an allocation is enough) comes with `failed`, which is given what it threw and fails whoever
// waits for what it was to bring about; the runtime has Call::then and StepRun for that. Without `failed` the process
// keeps the error, see escaped_error().
//
// Thread safety: every method from any thread. In a process that is left behind (see core/engine_life.h) an event that
// is pending stays so: fire and fail do nothing, waiting for it throws Error.
class Event {
 public:
  using Callback = std::function<void()>;
  using Failed = std::function<void(std::exception_ptr)>;  // must not throw

  void fire() noexcept;
  // The same, of work that was done at `time_ms` by Clock, which is not later than now.
  void fire_at(double time_ms) noexcept;
  // Does nothing when the event is complete already, so the first error wins.
  void fail(std::exception_ptr error) noexcept;

  bool complete() const;
  // The error it failed with; null while pending or when it fired.
  std::exception_ptr error() const;

  // Blocks until complete; rethrows the error of a failed event.
  void wait() const;
  // Blocks until complete, failed or not.
  void wait_complete() const;
  // Blocks at most `timeout_ms`; true when complete. Never throws the event's error.
  bool wait_for(double timeout_ms) const;

  // Runs `callback` once complete: at once on this thread if it is already. Throws only std::bad_alloc, and then
  // `callback` never runs.
  void then(Callback callback, Failed failed = nullptr);

  // Clock::now_ms() of completion; 0 while pending.
  double time_ms() const;

 private:
  enum class State { kPending, kFired, kFailed };
  struct Follower {
    Callback callback;
    Failed failed;
  };
  void finish(State state, std::exception_ptr error, double time_ms) noexcept;
  // Locked, except where a thread that is not here may have the lock for ever.
  std::unique_lock<std::mutex> locked() const;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  // Protected by mutex_.
  State state_ = State::kPending;
  std::exception_ptr error_;
  double time_ms_ = 0;
  std::vector<Follower> followers_;
};

using EventPtr = std::shared_ptr<Event>;

inline EventPtr make_event() { return std::make_shared<Event>(); }

// An event that has fired.
EventPtr fired_event();

// Runs `callback` when every event is complete (failed ones too). Null events count as complete. As Event::then with
// what `callback` throws, and with std::bad_alloc.
void when_all(const std::vector<EventPtr>& events, Event::Callback callback, Event::Failed failed = nullptr);

// Runs `callback` now, as an event does: never throws.
void run_callback(const Event::Callback& callback, const Event::Failed& failed) noexcept;

// The first error that came out of a callback without `failed`; null if there was none. Something may then be pending
// for ever, so wait_interruptible throws it where it would go on waiting.
std::exception_ptr escaped_error();
// The same, and forgets it.
std::exception_ptr take_escaped_error();

// `hook` runs before an event completes, on the completing thread: a test can delay any of them. Null = none. Set while
// nothing is running.
void set_completion_hook(std::function<void()> hook);

// Blocks until complete, calling Frontend::check_interrupt about every 50 ms; rethrows what that throws, the escaped
// error if there is one, else the event's error.
void wait_interruptible(const Event& event);
// Blocks until complete, failed or not; throws the escaped error if there is one, as nobody may ever complete it.
void wait_unless_lost(const Event& event);

}  // namespace roundpipe::device
