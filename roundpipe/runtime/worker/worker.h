#pragma once

#include <memory>
#include <thread>

#include <roundpipe/runtime/worker/device_room.h>
#include <roundpipe/runtime/worker/job_queue.h>
#include <roundpipe/runtime/worker/job_runner.h>

namespace roundpipe::runtime {

// Who learns from the transfers of a device's link; null: nobody does.
struct LinkObservers {
  std::shared_ptr<transfer::LinkObserver> up;    // host to device
  std::shared_ptr<transfer::LinkObserver> down;  // device to host
};

// One device with its compute thread and both directions of its link. Runs the jobs of its queue in order.
// Thread safety: any thread.
class Worker {
 public:
  Worker(int index, std::unique_ptr<device::Device> device, LinkObservers observers = {});
  ~Worker() { stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Runs the queued jobs, ends the worker's threads and frees the device memory kept for later jobs. Nothing may be
  // submitted from now on; everything else can still be called. Not from a thread of the engine. A second call does
  // nothing.
  void stop();

  // A submission holds the locks of all workers' queues at once, taken by ascending index. It calls enqueued() after it
  // has put this worker's jobs into the queue, with the queue's lock held.
  JobQueue& queue() { return queue_; }
  void enqueued() ROUNDPIPE_REQUIRES(queue_.mutex()) { room_.enqueued(); }

  device::Device& device() { return *device_; }
  // Frees the device memory kept for later jobs.
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
  // The generators that layers and backward passes on this worker draw from.
  const std::shared_ptr<torch_compat::OwnGenerators> generators_ = std::make_shared<torch_compat::OwnGenerators>();
  Outbox outbox_;
  LayerRunner layers_;
  DeviceRoom room_;
  JobRunner runner_;
  std::thread thread_;
};

}  // namespace roundpipe::runtime
