#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <roundpipe/core/mutex.h>
#include <roundpipe/runtime/call/job_run.h>

namespace roundpipe::runtime {

// The jobs of one device, in order. The front job runs; meanwhile, the weights and first inputs of the next one are
// prefetched. A job stays in the queue until its compute has been issued, and then is "being released" until its
// compute and its last transfer are complete.
// Thread safety: any thread, unless said otherwise.
class JobQueue {
 public:
  using JobPtr = std::shared_ptr<JobRun>;

  // The queue's lock. Callers hold it across several calls, since they act on what an earlier call returned; a
  // submission holds the locks of all devices at once.
  Mutex& mutex() ROUNDPIPE_RETURNS_LOCK(mutex_) { return mutex_; }

  // Returns whether all jobs in the queue belong to `model`. Raises `begun` to the highest position of the model's jobs
  // here that have a slot.
  bool look(const ModelState& model, double& begun) const ROUNDPIPE_REQUIRES(mutex_);
  // Inserts the job at the end, but before waiting jobs with a later position (of one position, those with a later
  // number), if that position is also after `begun`.
  // Never before a job that has a slot, nor before one of an earlier era.
  void enqueue(JobPtr job, double begun) ROUNDPIPE_REQUIRES(mutex_);
  const std::deque<JobPtr>& jobs() const ROUNDPIPE_REQUIRES(mutex_) { return jobs_; }
  // The second job if it has a slot, else null.
  JobPtr prefetched() const ROUNDPIPE_REQUIRES(mutex_);
  // Whether the front has been handed to the device's thread.
  bool runs() const ROUNDPIPE_REQUIRES(mutex_) { return runs_; }
  // Whether the running job has run out of memory, so that the next jobs take none until it is over.
  bool alone() const ROUNDPIPE_REQUIRES(mutex_) { return alone_; }
  // How many microbatches of the next job may be staged at this point.
  int next_staged() const ROUNDPIPE_REQUIRES(mutex_) { return next_staged_; }
  void set_next_staged(int count) ROUNDPIPE_REQUIRES(mutex_) { next_staged_ = count; }
  // Wakes the threads that wait in the methods below.
  void notify() ROUNDPIPE_REQUIRES(mutex_) { changed_.notify_all(); }

  // Blocks until the front job has a slot, and returns it to be run. Returns null once the queue has been stopped and
  // all of its jobs are released. The device's thread.
  JobPtr wait_for_job();
  JobPtr running();
  // Marks that the running job needs all memory: jobs behind it take none from now on. Returns the next job, if it has
  // a slot, and its transfers that have taken memory so far.
  struct Next {
    JobPtr job;
    std::vector<device::EventPtr> begun;
  };
  Next run_alone();
  // Called before a transfer of `job`, which fires `done`, takes device memory. Throws c10::OutOfMemoryError if `job`
  // waits while the running job needs all memory. `device`: the device's name, for the message.
  void admit(const JobRun& job, const device::EventPtr& done, const std::string& device);

  // Removes the running job from the queue. It counts as being released until released() is called, once per job.
  void pop() ROUNDPIPE_REQUIRES(mutex_);
  // `over`: whether the job is over with that.
  void released(const JobPtr& job, bool over) ROUNDPIPE_REQUIRES(mutex_);
  // The jobs that were put here and are not over: those in the queue, those being released, and those whose attempt is
  // broken.
  const std::vector<JobPtr>& unfinished() const ROUNDPIPE_REQUIRES(mutex_) { return unfinished_; }
  // `job` has been given up, or is attempted elsewhere.
  void forget(const JobPtr& job) ROUNDPIPE_REQUIRES(mutex_) { std::erase(unfinished_, job); }
  // Blocks until no job is being released. Returns false if none was.
  bool wait_released();

  // No more jobs will come. wait_for_job() still returns those that are in the queue.
  void stop();
  // Blocks until no job is in the queue or being released. Returns false early once the queue has been left, if there
  // still is one.
  bool drained();
  // Nobody waits for this queue's jobs any more: its thread may never go on.
  void leave();
  // Whether it has been left, and there still are jobs.
  bool is_stuck() const;

 private:
  mutable Mutex mutex_;
  Condition changed_;
  bool left_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  std::deque<JobPtr> jobs_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::vector<JobPtr> unfinished_ ROUNDPIPE_GUARDED_BY(mutex_);
  bool runs_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  bool alone_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  bool stopping_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  int releasing_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  int next_staged_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
};

}  // namespace roundpipe::runtime
