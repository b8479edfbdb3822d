#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>

#include <roundpipe/core/mutex.h>
#include <roundpipe/device/event.h>

namespace roundpipe::runtime {

// The thread of this process on which step functions of programs run: one at a time, in the order in which they were
// queued. It stays the same thread, with the same state of an interpreter. A function is called with no lock held.
// Thread safety: any thread. The object lives as long as the process.
class FunctionThread {
 public:
  // A function that was queued.
  class Run {
   public:
    // Waits until it is over. Interruptible.
    void wait() const { device::wait_interruptible(*over_); }
    // What it returned; throws what it threw. REQUIRES: it is over.
    bool result() const;

   private:
    friend class FunctionThread;
    std::function<bool()> function_;
    const device::EventPtr over_ = device::make_event();
    bool returned_ = false;
    std::exception_ptr error_;
  };
  using RunPtr = std::shared_ptr<Run>;

  static FunctionThread& instance();

  // Throws Error in a process that was left behind.
  RunPtr queue(std::function<bool()> function);
  // Whether this is that thread, while a function runs on it.
  static bool is_here();
  // Throws Error if it is, where something waits for step functions.
  static void require_elsewhere();
  // Waits until everything queued so far is over. Interruptible; on the thread itself, returns at once.
  void wait_all();
  // Blocks until nothing is queued, if there is the thread, for the end of the process.
  static void drain_any();

 private:
  FunctionThread();
  void run();

  Mutex mutex_;
  Condition changed_;
  std::deque<RunPtr> queued_ ROUNDPIPE_GUARDED_BY(mutex_);
  device::EventPtr newest_ ROUNDPIPE_GUARDED_BY(mutex_);  // no more of that run, which may hold what it threw
  bool working_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
};

}  // namespace roundpipe::runtime
