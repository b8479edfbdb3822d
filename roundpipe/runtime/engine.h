#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/runtime/machine_meter.h>
#include <roundpipe/runtime/overseer.h>
#include <roundpipe/runtime/worker/worker.h>

namespace roundpipe::runtime {

// The pool of devices, which all models of the process share.
//
// A device that fails is taken out: jobs are queued on the others only. Jobs that it had, and those that other devices
// have begun behind them, are attempted again elsewhere if their calls are fault tolerant. All other calls under way
// fail, because what they wait for may never come.
// Thread safety: any thread. Destroying an engine finishes all work submitted to it, but leaves a device behind that
// its watchdog has given up and whose threads still have not ended.
class Engine {
 public:
  // `fp16_accumulation`: as torch's switch is to be while calls begin, see device/fp16_accumulation.h.
  explicit Engine(const std::vector<device::DeviceSpec>& specs, bool fp16_accumulation = false);
  // Uses devices that were made elsewhere, one for each of `specs`.
  Engine(const std::vector<device::DeviceSpec>& specs, std::vector<std::unique_ptr<device::Device>> devices,
         bool fp16_accumulation = false);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // The current pool; made from default_devices() if none was set. Throws Error if the engine cannot run, see
  // core/engine_life.h.
  static std::shared_ptr<Engine> current();
  // Replaces the pool with one of `specs` and returns it. The old pool ends with the last call that uses it. The new
  // one has torch's switch of fp16 accumulation turned; if that changes it, all pools finish the jobs that they have
  // first. Unset: as the environment says.
  static std::shared_ptr<Engine> set_current(const std::vector<device::DeviceSpec>& specs,
                                             std::optional<bool> fp16_accumulation = std::nullopt);
  // Ends the engine for good: finishes the work of every pool, including steps, and ends all threads. Calls made
  // meanwhile complete or throw Error; later ones throw. Runs at process exit (std::atexit) unless it was called
  // before, for example by an interpreter that ends earlier. Not from a thread of the engine. Does nothing in a process
  // that is left behind.
  static void shut_down();

  // The devices of the pool, whether they have failed or not. Throws Error once the engine has ended.
  int pool_size() const { return static_cast<int>(specs_.size()); }
  Worker& pool_worker(int index);

  // The devices that have not been taken out. Their number may change at any time, so an index wraps around.
  int size() const;
  // Throws Error once the engine has ended.
  Worker& worker(int index);
  // How often a device was taken out or brought back.
  uint64_t changes() const;
  // Takes the devices out that have failed and that nobody has seen to yet.
  void see_to_failures();
  // The numbers of the workers, see Shells: of all whose threads have not ended, and of those that are stuck.
  std::vector<int> workers() const;
  std::vector<int> stuck_workers() const;
  // Blocks until no worker has jobs, stuck ones apart: attempts that have been abandoned may outlast their calls.
  void wait_idle();
  // Throws DeviceError if all devices have been taken out.
  void require_devices() const;
  struct Failed {
    int index;  // in the pool
    std::string name;
    std::string error;
  };
  std::vector<Failed> failed() const;
  // Brings the devices back that have been taken out, made anew from their specs, without faults. Returns their names.
  // Throws what making a device throws; those before it are back then.
  std::vector<std::string> restore();
  // Lets the threads go on that hang because of an injected fault, also those of devices that have come back since.
  void release_hangs();

  c10::DeviceType device_type() { return worker(0).device().torch_device().type(); }
  bool wants_pinned_host_memory() { return worker(0).device().wants_pinned_host_memory(); }
  const std::vector<device::DeviceSpec>& specs() const { return specs_; }
  bool fp16_accumulation() const { return fp16_accumulation_; }

  // Queues jobs on their devices, in the order of their positions. They go behind all queued jobs, on all devices at
  // once, so that submissions from several threads cannot wait for each other in a circle. If only calls of the same
  // model are queued, a job goes before waiting jobs of later position instead. Then all devices agree on one order:
  // jobs that have begun on any device, and those before them, stay in front. Throws std::invalid_argument if torch's
  // switch of fp16 accumulation is not the pool's.
  void submit(const std::vector<std::shared_ptr<JobRun>>& runs) ROUNDPIPE_NOT_ANALYZED;

  // `run` is checked (see JobCheck), and the bits of its second run differ. Sees to it that both devices and a third
  // one run the job again, and that bytes are sent to the two and back. Does not wait.
  void dispute(const std::shared_ptr<JobRun>& run);

  // Whether a fused job of `call` is queued and has not begun: no device fetches its weights yet.
  bool fused_waits(const Call& call);

  // What the transfers of this pool tell about its links.
  const MachineMeter& meter() const { return meter_; }

  // The device at which the next plan's round robin starts. advance() moves it on by the `jobs` jobs of a plan.
  int first_device() const { return next_device_; }
  void advance(int jobs);

 private:
  using JobPtr = JobQueue::JobPtr;
  // What is to be done after a device has been taken out, without the locks of the queues. Keeps what it names, which
  // may belong to the interpreter, until no lock is held.
  struct Aftermath {
    std::vector<CallPtr> failing;
    std::vector<JobPtr> given_up;
    std::vector<JobPtr> lost;
    std::vector<JobPtr> attempted_again;  // of `lost`
  };

  void stop();
  // Does `work`, under the locks of submissions, while no device of `engines` has jobs; returns whether that was so.
  static bool while_idle(const std::vector<std::shared_ptr<Engine>>& engines,
                         const std::function<void()>& work) ROUNDPIPE_NOT_ANALYZED;
  std::vector<Worker*> live() const;
  std::vector<int> numbers(bool (Worker::*counts)() const) const;
  std::unique_ptr<Worker> make_worker(int index, std::unique_ptr<device::Device> device);
  // Watches the devices, and takes out those that have failed. One thread at a time.
  std::vector<Aftermath> look() ROUNDPIPE_REQUIRES(overseen_);
  void settle_disputes();
  void settle(const JobPtr& run) ROUNDPIPE_NOT_ANALYZED;
  Aftermath take_out(Worker& failed);
  Aftermath remove(Worker& failed) ROUNDPIPE_NOT_ANALYZED;
  // Puts other attempts at the lost jobs into the queues.
  static void attempt_again(const std::vector<Worker*>& devices, Aftermath& aftermath) ROUNDPIPE_NOT_ANALYZED;

  const std::vector<device::DeviceSpec> specs_;
  const bool fp16_accumulation_;
  MachineMeter meter_;
  std::shared_ptr<Overseer> overseer_;  // wakes outlive this
  Mutex overseen_{Mutex::Kind::kTurn};  // taken before all others
  Mutex mutex_;                         // one submission at a time; taken before those of the queues
  bool stopping_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  uint64_t era_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;  // see JobRun::era
  uint64_t next_job_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  const ModelState* era_model_ ROUNDPIPE_GUARDED_BY(mutex_) = nullptr;

  mutable Mutex pool_mutex_;  // taken after all others
  std::vector<JobPtr> disputes_ ROUNDPIPE_GUARDED_BY(pool_mutex_);
  std::vector<std::unique_ptr<Worker>> workers_ ROUNDPIPE_GUARDED_BY(pool_mutex_);
  std::vector<std::unique_ptr<Worker>> retired_ ROUNDPIPE_GUARDED_BY(pool_mutex_);  // of devices that have come back
  std::vector<Worker*> live_ ROUNDPIPE_GUARDED_BY(pool_mutex_);
  uint64_t changes_ ROUNDPIPE_GUARDED_BY(pool_mutex_) = 0;

  std::atomic<int> next_device_{0};
};

}  // namespace roundpipe::runtime
