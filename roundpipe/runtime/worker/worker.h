#pragma once

#include <memory>
#include <thread>

#include <roundpipe/runtime/worker/device_room.h>
#include <roundpipe/runtime/worker/job_queue.h>
#include <roundpipe/runtime/worker/job_runner.h>

namespace roundpipe::runtime {

// One device with its compute thread and its two links. Runs the jobs of its queue in order.
// Thread safety: any thread.
class Worker {
 public:
  Worker(int index, std::unique_ptr<device::Device> device);
  ~Worker() { stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Runs what is queued, ends the worker's threads and frees what it keeps on the device. Nothing may be submitted from
  // now on; the rest can still be asked. Not from a thread of the engine. Again: does nothing.
  void stop();

  // A submission holds the locks of all workers' queues at once, taken by ascending index; enqueued() once the jobs of
  // this one are in, with its lock held.
  JobQueue& queue() { return queue_; }
  void enqueued() ROUNDPIPE_REQUIRES(queue_.mutex()) { room_.enqueued(); }

  device::Device& device() { return *device_; }
  // Gives back what the device keeps for later jobs.
  void trim() { room_.trim(); }
  const transfer::LinkScheduler& upload() const { return upload_; }
  const transfer::LinkScheduler& download() const { return download_; }

 private:
  void loop();
  void execute(JobRun& run);

  std::unique_ptr<device::Device> device_;
  transfer::LinkScheduler upload_;
  transfer::LinkScheduler download_;
  JobQueue queue_;
  // What layers and backward passes here draw from.
  const std::shared_ptr<torch_compat::OwnGenerators> generators_ = std::make_shared<torch_compat::OwnGenerators>();
  Outbox outbox_;
  LayerRunner layers_;
  DeviceRoom room_;
  JobRunner runner_;
  std::thread thread_;
};

}  // namespace roundpipe::runtime
