#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include <roundpipe/runtime/worker/device_room.h>
#include <roundpipe/runtime/worker/job_queue.h>
#include <roundpipe/runtime/worker/job_runner.h>
#include <roundpipe/runtime/worker/watch.h>

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
  // `index`: the place of the device in the pool. `number`: among all workers of the process, since a device that
  // comes back gets a new one.
  Worker(int index, int number, std::unique_ptr<device::Device> device, LinkObservers observers = {});
  ~Worker() { stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Runs the queued jobs, ends the worker's threads and frees the device memory kept for later jobs. Nothing may be
  // submitted from now on; everything else can still be called. Not from a thread of the engine. A second call does
  // nothing. Nor does a call while the worker is stuck: its threads cannot be ended.
  void stop();
  // False once stop() has ended the threads.
  bool has_threads() const { return !ended_.load(); }
  int number() const { return number_; }
  // Whether the watchdog has given the device up, and a thread of it still has jobs. An object that is stuck must not
  // be destroyed.
  bool is_stuck() const { return queue_.is_stuck(); }

  // Fails the device if it has been busy with one thing for longer than its watchdog allows.
  void watch();

  // A submission holds the locks of all workers' queues at once, taken by ascending index. It calls enqueued() after it
  // has put this worker's jobs into the queue, with the queue's lock held.
  JobQueue& queue() { return queue_; }
  void enqueued() ROUNDPIPE_REQUIRES(queue_.mutex()) { room_.enqueued(); }

  // Sends bytes to the device and back. Does not wait: `told` learns, on any thread, whether they came back unchanged;
  // true also if they could not be sent.
  void try_copies(std::function<void(bool same)> told);

  device::Device& device() { return *device_; }
  // Frees the device memory kept for later jobs.
  void trim() { room_.trim(); }
  // Bytes of frozen weights that stay on the device, see ResidentWeights.
  int64_t resident_bytes() const { return room_.resident_bytes(); }
  const transfer::LinkScheduler& upload() const { return upload_; }
  const transfer::LinkScheduler& download() const { return download_; }

 private:
  void loop();
  void execute(JobRun& run);

  const int number_;
  std::atomic<bool> ended_{false};
  std::unique_ptr<device::Device> device_;
  transfer::LinkScheduler upload_;
  transfer::LinkScheduler download_;
  JobQueue queue_;
  // The generators that layers and backward passes on this worker draw from.
  const std::shared_ptr<torch_compat::OwnGenerators> generators_ = std::make_shared<torch_compat::OwnGenerators>();
  Watch watch_;
  Outbox outbox_;
  LayerRunner layers_;
  DeviceRoom room_;
  JobRunner runner_;
  std::thread thread_;
};

}  // namespace roundpipe::runtime
