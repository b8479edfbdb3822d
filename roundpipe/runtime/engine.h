#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/runtime/worker/worker.h>

namespace roundpipe::runtime {

// The pool of devices that all models of the process share.
// Thread safety: any thread. Destroying an engine finishes what it was given.
class Engine {
 public:
  explicit Engine(const std::vector<device::DeviceSpec>& specs);
  // Over devices that were made elsewhere, one for each of `specs`.
  Engine(const std::vector<device::DeviceSpec>& specs, std::vector<std::unique_ptr<device::Device>> devices);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // The current pool; made from default_devices() when none was set. Throws Error where the engine cannot run, see
  // core/engine_life.h.
  static std::shared_ptr<Engine> current();
  // Replaces the pool by one of `specs` and returns it; the old one ends when the last call that uses it does.
  static std::shared_ptr<Engine> set_current(const std::vector<device::DeviceSpec>& specs);
  // Ends the engine for good: finishes what every pool was given, steps included, and ends their threads. Calls that
  // come meanwhile complete or throw Error; all after it throw. Runs when the process exits (std::atexit), if nobody,
  // such as an interpreter that ends before, has called it. Not from a thread of the engine. In a process that is left
  // behind: does nothing.
  static void shut_down();

  int size() const { return static_cast<int>(specs_.size()); }
  // Throws Error once the engine has ended.
  Worker& worker(int index) {
    require_engine();
    return *workers_[static_cast<size_t>(index)];
  }
  c10::DeviceType device_type() { return worker(0).device().torch_device().type(); }
  bool wants_pinned_host_memory() { return worker(0).device().wants_pinned_host_memory(); }
  const std::vector<device::DeviceSpec>& specs() const { return specs_; }

  // Gives each device its jobs, in the order of their positions. They stand behind everything that is there, together
  // on every device, so that submissions from several threads cannot wait for each other in a circle. But where only
  // earlier calls of the same model wait, a job goes before those of later position: all devices agree on one order,
  // in which what has begun anywhere, and whatever stands before that, stays in front.
  void submit(const std::vector<std::shared_ptr<JobRun>>& runs) ROUNDPIPE_NOT_ANALYZED;

  // Where the next plan's round robin starts, when the last one used `jobs` jobs.
  int first_device() const { return next_device_; }
  void advance(int jobs);

 private:
  // REQUIRES: engine_ends() has been called.
  void stop();

  const std::vector<device::DeviceSpec> specs_;
  std::vector<std::unique_ptr<Worker>> workers_;  // as many for as long as this lives, with or without threads
  std::mutex mutex_;
  std::atomic<int> next_device_{0};
};

}  // namespace roundpipe::runtime
