#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace roundpipe::device {

// A one-shot completion: pending, then fired or failed for good.
//
// An event fires when its work is really done; on accelerators, when the device has passed that point. Whoever has seen
// it fire may use the memory from any thread or queue.
//
// Callbacks run on the completing thread, without the lock, and must not block. Each callback runs even if an earlier
// one throws. A callback that can throw (an allocation is enough) needs `failed`: it receives the error and must fail
// everything that waits for the callback's effect. The runtime does this in Call::then and StepRun. Without `failed`,
// the process keeps the error, see escaped_error().
//
// Thread safety: every method from any thread. In a process that was left behind (see core/engine_life.h), a pending
// event stays pending: fire and fail do nothing, the wait methods and then throw Error.
class Event {
 public:
  using Callback = std::function<void()>;
  using Failed = std::function<void(std::exception_ptr)>;  // must not throw

  void fire() noexcept;
  // Fires for work that was done at `time_ms` by Clock, which is not later than now.
  void fire_at(double time_ms) noexcept;
  // Does nothing if the event is complete already, so the first error wins.
  void fail(std::exception_ptr error) noexcept;
  // Fails if there is an error, else fires.
  void end(std::exception_ptr error) noexcept;

  bool complete() const;
  // The error of a failed event; null if it is pending or has fired.
  std::exception_ptr error() const;

  // Blocks until complete; rethrows the error of a failed event.
  void wait() const;
  // Blocks until complete, failed or not.
  void wait_complete() const;
  // Blocks for at most `timeout_ms`; returns whether the event is complete. Never throws the event's error.
  bool wait_for(double timeout_ms) const;

  // Runs `callback` when the event completes; if it is complete already, at once on this thread. Throws std::bad_alloc;
  // then `callback` never runs.
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
  friend class UserOfEvent;
  // Locks, unless the process was left behind: there, a thread that no longer exists may hold the lock for ever.
  std::unique_lock<std::mutex> locked() const;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  // Protected by mutex_.
  State state_ = State::kPending;
  std::exception_ptr error_;
  double time_ms_ = 0;
  mutable int waiting_users_ = 0;  // until it is complete
  std::vector<Follower> followers_;
};

using EventPtr = std::shared_ptr<Event>;

inline EventPtr make_event() { return std::make_shared<Event>(); }

// An event that has fired.
EventPtr fired_event();

// Runs `callback` when every event is complete, fired or failed. Null events count as complete. Errors of `callback`
// and std::bad_alloc are treated as by Event::then.
void when_all(const std::vector<EventPtr>& events, Event::Callback callback, Event::Failed failed = nullptr);

// Runs `callback` now and treats its errors as an event does. Never throws.
void run_callback(const Event::Callback& callback, const Event::Failed& failed) noexcept;

// The first error of a callback without `failed`; null if there is none. After such an error, an event may be pending
// for ever, so wait_interruptible throws the error instead of waiting on.
std::exception_ptr escaped_error();
// Returns the escaped error and clears it.
std::exception_ptr take_escaped_error();

// Lets tests delay completions: `hook` runs before each event completes, on the completing thread. Null = none. Call
// this only while nothing is running.
void set_completion_hook(std::function<void()> hook);

// The calling thread waits for the engine while this lives, so that the user can do nothing for it. The waits below
// count as one until their event completes, whenever the thread wakes up then.
class WaitingUser {
 public:
  WaitingUser();
  ~WaitingUser();
  WaitingUser(const WaitingUser&) = delete;
  WaitingUser& operator=(const WaitingUser&) = delete;

  // Whether any lives.
  static bool any() noexcept;
  // From now on, `hook` runs on every thread that begins to wait, once any() holds. There is one hook. The thread holds
  // no lock: see require_no_locks.
  static void set_hook(void (*hook)() noexcept) noexcept;
};

// Blocks until `event` is complete and rethrows its error. About every 50 ms until then, throws the escaped error if
// there is one, and calls Frontend::check_interrupt, whose exceptions pass to the caller.
void wait_interruptible(const Event& event);

// Blocks until `event` is complete, failed or not. Throws the escaped error if there is one, because then nothing may
// ever complete the event.
void wait_unless_lost(const Event& event);

}  // namespace roundpipe::device
