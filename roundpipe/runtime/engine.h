#pragma once

#include <memory>
#include <string>
#include <vector>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/runtime/machine_meter.h>
#include <roundpipe/runtime/worker/worker.h>

namespace roundpipe::runtime {

// The pool of devices, which all models of the process share.
// Thread safety: any thread. Destroying an engine finishes all work submitted to it.
class Engine {
 public:
  explicit Engine(const std::vector<device::DeviceSpec>& specs);
  // Uses devices that were made elsewhere, one for each of `specs`.
  Engine(const std::vector<device::DeviceSpec>& specs, std::vector<std::unique_ptr<device::Device>> devices);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // The current pool; made from default_devices() if none was set. Throws Error if the engine cannot run, see
  // core/engine_life.h.
  static std::shared_ptr<Engine> current();
  // Replaces the pool with one of `specs` and returns it. The old pool ends with the last call that uses it.
  static std::shared_ptr<Engine> set_current(const std::vector<device::DeviceSpec>& specs);
  // Ends the engine for good: finishes the work of every pool, including steps, and ends all threads. Calls made
  // meanwhile complete or throw Error; later ones throw. Runs at process exit (std::atexit) unless it was called
  // before, for example by an interpreter that ends earlier. Not from a thread of the engine. Does nothing in a process
  // that is left behind.
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

  // Queues jobs on their devices, in the order of their positions. They go behind all queued jobs, on all devices at
  // once, so that submissions from several threads cannot wait for each other in a circle. If only calls of the same
  // model are queued, a job goes before waiting jobs of later position instead. Then all devices agree on one order:
  // jobs that have begun on any device, and those before them, stay in front.
  void submit(const std::vector<std::shared_ptr<JobRun>>& runs) ROUNDPIPE_NOT_ANALYZED;

  // Whether a fused job of `call` is queued and has not begun: no device fetches its weights yet.
  bool fused_waits(const Call& call);

  // What the transfers of this pool tell about its links.
  const MachineMeter& meter() const { return meter_; }

  // The device at which the next plan's round robin starts. advance() moves it on by the `jobs` jobs of a plan.
  int first_device() const { return next_device_; }
  void advance(int jobs);

 private:
  // REQUIRES: engine_ends() has been called.
  void stop();

  const std::vector<device::DeviceSpec> specs_;
  MachineMeter meter_;
  std::vector<std::unique_ptr<Worker>> workers_;  // not changed while this lives, whether threads run or not
  Mutex mutex_;                                   // one submission at a time; taken before those of the queues
  std::atomic<int> next_device_{0};
};

}  // namespace roundpipe::runtime
