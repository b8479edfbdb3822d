#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include <roundpipe/memory/weight_slots.h>
#include <roundpipe/runtime/worker/job_runner.h>

namespace roundpipe::runtime {

// What another language's interpreter needs on the compute threads: called when one starts, and what it returns is
// dropped when the thread ends. Errors of code that a backward calls live in the thread's interpreter state until the
// engine has them, so that state must not come and go. Set once, before any worker.
void set_thread_attach(std::function<std::shared_ptr<void>()> attach);

// One device with its compute thread and its two links. Runs the jobs given to it in order, and uploads the next
// job's weights and first inputs while one runs.
// Thread safety: submissions and forget from any thread.
class Worker {
 public:
  Worker(int index, std::unique_ptr<device::Device> device);
  ~Worker() { stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Runs what is queued, ends the worker's threads and gives up what it keeps on the device. Nothing may be submitted
  // from now on; the rest can still be asked. Not from a thread of the engine. Again: does nothing.
  void stop();

  // For a submission, which holds the locks of all workers at once (taken by ascending index): lock(), look(),
  // enqueue() for each job, enqueued().
  std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }
  // False when a job of another model waits here. Raises `begun` to the last position that has begun.
  bool look(const ModelState& model, double& begun) const;
  // Puts the job before those that wait and have a later position, as long as that is after `begun`.
  void enqueue(std::shared_ptr<JobRun> run, double begun);
  void enqueued();
  device::Device& device() { return *device_; }
  void forget(const ModelState& model) { shells_.forget(model); }
  // Gives back what the device keeps for later jobs. Any thread.
  void trim() { slots_.drop_idle(); }
  const transfer::LinkScheduler& upload() const { return upload_; }
  const transfer::LinkScheduler& download() const { return download_; }

 private:
  void loop();
  void execute(JobRun& run);
  // Starts what can be started for the running and the next job. REQUIRES: mutex_ is held.
  void prefetch();
  void upload_weights(const std::shared_ptr<JobRun>& run);
  // Before a transfer of `run` takes device memory: throws c10::OutOfMemoryError while the running job needs it all.
  void admit(const JobRun& run, const device::EventPtr& done);
  // Gives up device memory for the running job: waits for what is on its way out, then puts what has been uploaded for
  // the next job back. False when there was neither.
  bool make_room();
  bool park_next();
  // What is to be left under the cap beside the weights of `run`, and of the job before it if that is still there.
  int64_t reserve_bytes(const JobRun& run, const JobRun* before) const;
  // Takes the weights of a job to the host, so that their memory can be given up; false when the host has none for
  // them. REQUIRES: they are on the device.
  bool park_weights(const std::shared_ptr<JobRun>& run);
  // Asks for them again.
  void unpark_weights(const std::shared_ptr<JobRun>& run);
  // Moves the running job's weights out of the arena that holds the next job's place, too, so that the arena goes. Once
  // for a device: its slots are separate from then on. False when they were, or when this is not the moment; true, too,
  // when the runner may have it later and is to ask again.
  bool leave_arena(const std::shared_ptr<JobRun>& running);
  // The running job has come so far that `count` microbatches of the next one may be staged.
  void stage_next(int count);
  void stage(JobRun& run, int count);
  // Blocks until what earlier jobs have sent is on the host; false when it was.
  bool wait_released();
  void release(const std::shared_ptr<JobRun>& run);

  const int index_;
  std::unique_ptr<device::Device> device_;
  transfer::LinkScheduler upload_;
  transfer::LinkScheduler download_;
  memory::WeightSlots slots_;
  Shells shells_;
  // What layers and backward passes here draw from.
  const std::shared_ptr<torch_compat::OwnGenerators> generators_ = std::make_shared<torch_compat::OwnGenerators>();
  JobRunner runner_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Protected by mutex_. The front of the queue is the running job.
  std::deque<std::shared_ptr<JobRun>> queue_;
  bool running_ = false;
  int releasing_ = 0;    // jobs that are over but whose transfers out are not
  int next_staged_ = 0;  // how many microbatches of the next job may be staged
  bool alone_ = false;   // the running job has run out of memory: the next ones wait for it to be over
  bool stopping_ = false;

  std::thread thread_;
};

}  // namespace roundpipe::runtime
