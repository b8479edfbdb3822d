#pragma once

#include <deque>
#include <optional>
#include <string>

#include <roundpipe/core/mutex.h>
#include <roundpipe/runtime/call/job_run.h>

namespace roundpipe::runtime {

// What a device computes and since when, for its watchdog. Time in which the device waits for others does not count.
// Thread safety: overdue() from any thread, the rest on the device's thread.
class Watch {
 public:
  // One microbatch, from before its first work is issued until all of it has been.
  class Scope {
   public:
    Scope(Watch& watch, const JobRun& run, int microbatch);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Watch& watch_;
  };
  // As long as this lives, the device's thread waits for something that the device does not compute.
  class Pause {
   public:
    explicit Pause(Watch& watch) : watch_(watch) { watch.pause(1); }
    ~Pause() { watch_.pause(-1); }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    Watch& watch_;
  };
  // All work of the microbatch has been issued; `done` completes when the device has done it.
  void issued(device::EventPtr done);

  // Says what has taken longer than `limit_ms`; nothing if nothing has.
  std::optional<std::string> overdue(double now_ms, double limit_ms) const;

 private:
  struct Work {
    std::string model;
    schedule::Job job;
    int microbatch = 0;
    device::EventPtr done;  // null: not all of it has been issued
  };
  void pause(int change);

  mutable Mutex mutex_;
  std::deque<Work> work_ ROUNDPIPE_GUARDED_BY(mutex_);  // that may not be done, oldest first
  double since_ms_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;    // when the thread last went on
  int pauses_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
};

}  // namespace roundpipe::runtime
