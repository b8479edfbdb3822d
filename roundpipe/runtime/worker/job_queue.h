#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <roundpipe/core/mutex.h>
#include <roundpipe/runtime/call/job_run.h>

namespace roundpipe::runtime {

// The jobs of one device in their order. The front is the running job; the next one has its weights and first inputs
// brought meanwhile. A job is in the queue until its compute is over, and is "being released" until its last transfer
// is.
// Thread safety: any thread, unless said otherwise.
class JobQueue {
 public:
  using JobPtr = std::shared_ptr<JobRun>;

  // What follows a call that REQUIRES the lock depends on it: a submission holds the locks of all devices at once.
  Mutex& mutex() ROUNDPIPE_RETURNS_LOCK(mutex_) { return mutex_; }

  // False when a job of another model waits here. Raises `begun` to the last position that has begun.
  bool look(const ModelState& model, double& begun) const ROUNDPIPE_REQUIRES(mutex_);
  // Puts the job before those that wait and have a later position, as long as that is after `begun`.
  void enqueue(JobPtr job, double begun) ROUNDPIPE_REQUIRES(mutex_);
  const std::deque<JobPtr>& jobs() const ROUNDPIPE_REQUIRES(mutex_) { return jobs_; }
  // The second job, if it has a slot; else null.
  JobPtr prefetched() const ROUNDPIPE_REQUIRES(mutex_);
  // Whether the front has been handed to the device's thread.
  bool runs() const ROUNDPIPE_REQUIRES(mutex_) { return runs_; }
  // Whether the running job has run out of memory: the next ones wait for it to be over.
  bool alone() const ROUNDPIPE_REQUIRES(mutex_) { return alone_; }
  // How many microbatches of the next job may be staged by now.
  int next_staged() const ROUNDPIPE_REQUIRES(mutex_) { return next_staged_; }
  void set_next_staged(int count) ROUNDPIPE_REQUIRES(mutex_) { next_staged_ = count; }
  // Wakes whoever waits below.
  void notify() ROUNDPIPE_REQUIRES(mutex_) { changed_.notify_all(); }

  // Blocks until the first job has a slot, and hands it out to be run; null when the queue has been stopped and all
  // that was in it is released. The device's thread.
  JobPtr wait_for_job();
  JobPtr running();
  // The running job needs all memory: jobs behind it take none from now on. Returns the next one, if it has a slot,
  // and which of its transfers have taken memory so far.
  struct Next {
    JobPtr job;
    std::vector<device::EventPtr> begun;
  };
  Next run_alone();
  // Before a transfer of `job`, which fires `done`, takes device memory. Throws c10::OutOfMemoryError while the running
  // job needs it all. `device`: its name.
  void admit(const JobRun& job, const device::EventPtr& done, const std::string& device);

  // The running job leaves the queue, and is being released until released() is called, once for each.
  void pop() ROUNDPIPE_REQUIRES(mutex_);
  void released() ROUNDPIPE_REQUIRES(mutex_) { --releasing_; }
  // Blocks until no job is being released; false when none was.
  bool wait_released();

  // Nothing comes any more. wait_for_job() still hands out what is here.
  void stop();

 private:
  Mutex mutex_;
  Condition changed_;
  std::deque<JobPtr> jobs_ ROUNDPIPE_GUARDED_BY(mutex_);
  bool runs_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  bool alone_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  bool stopping_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  int releasing_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  int next_staged_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
};

}  // namespace roundpipe::runtime
