#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <roundpipe/runtime/worker.h>

namespace roundpipe::runtime {

// The pool of devices that all models of the process share.
// Thread safety: any thread. Destroying an engine finishes what it was given.
class Engine {
 public:
  explicit Engine(const std::vector<device::DeviceSpec>& specs);

  // The current pool; made from default_devices() when none was set.
  static std::shared_ptr<Engine> current();
  // Replaces the pool by one of `specs` and returns it; the old one ends when the last call that uses it does.
  static std::shared_ptr<Engine> set_current(const std::vector<device::DeviceSpec>& specs);
  // Ends every pool of the process: finishes what they were given, steps included, and joins their threads. They cannot
  // be used again. Not from a thread of the engine.
  static void shut_down();

  int size() const { return static_cast<int>(specs_.size()); }
  Worker& worker(int index) { return *workers_[static_cast<size_t>(index)]; }
  c10::DeviceType device_type() { return workers_.front()->device().torch_device().type(); }
  bool wants_pinned_host_memory() { return workers_.front()->device().wants_pinned_host_memory(); }
  const std::vector<device::DeviceSpec>& specs() const { return specs_; }

  // Gives each device its jobs, in the order of their positions. They stand behind everything that is there, together
  // on every device, so that submissions from several threads cannot wait for each other in a circle. But where only
  // earlier calls of the same model wait, a job goes before those of later position: all devices agree on one order,
  // in which what has begun anywhere, and whatever stands before that, stays in front.
  void submit(const std::vector<std::shared_ptr<JobRun>>& runs);

  // Where the next plan's round robin starts, when the last one used `jobs` jobs.
  int first_device() const { return next_device_; }
  void advance(int jobs);

  void forget(const ModelState& model);

 private:
  void stop();

  const std::vector<device::DeviceSpec> specs_;
  std::mutex mutex_;
  std::atomic<int> next_device_{0};
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace roundpipe::runtime
