#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/mutex.h>
#include <roundpipe/device/health.h>
#include <roundpipe/runtime/call/call.h>
#include <roundpipe/runtime/call/verdict.h>

namespace roundpipe::runtime {

// The job, as its first run has left it.
class CheckedJob {
 public:
  virtual ~CheckedJob() = default;
  // Writes the buffers that the job has changed, for those who wait for them. `keep_old`: further runs of the job will
  // read what they were.
  virtual void hand_on_buffers(bool keep_old) = 0;
  // The same, unless that is done, and lets go of all that the job has read.
  virtual void conclude() = 0;
};

// Whether one job of a call has the same bits on another device: the job runs as usual, and once more elsewhere. Of
// that second run only the checksums of its results remain. If they differ from those of the first run, both devices
// and a third one run the job again, to tell which device is wrong; then the call fails, and that device has failed.
//
// Until this is decided, what the job reads stays on the host, and the call is not finished. The results of the first
// run do not wait for it.
// Thread safety: any thread.
class JobCheck {
 public:
  // `dispute` is called, on a thread of a device, if the first two runs differ; it must not wait. It has to see to it
  // that the job runs again, or that decide() is called. The call is not over
  // before this is decided.
  JobCheck(CallPtr call, schedule::Job job, std::function<void()> dispute);

  // Adds a run and returns its number. The first one is the job's own.
  int add_run();
  // The device of a run. If a run goes on elsewhere, since its device has failed, nothing is decided.
  void runs_on(int run, const std::shared_ptr<device::Health>& device);
  // A result of a run, with checksum_of() its tensors.
  void saw(int run, const JobResult& result, uint32_t checksum);
  // A run is over, or was given up because its call has failed. `job`: what ends once this is decided.
  void over(int run, std::shared_ptr<CheckedJob> job);

  // The devices of the runs so far, each once.
  std::vector<std::shared_ptr<device::Health>> devices() const;
  // Makes the decision wait for what copied() says of so many devices.
  void expect_copies(size_t devices);
  // Whether bytes that were sent to the device and back came back unchanged.
  void copied(const std::shared_ptr<device::Health>& device, bool unchanged);
  // Decides with the runs that there are.
  void decide();

 private:
  struct Run {
    CheckedRun seen;
    bool begun = false;
    bool over = false;
  };
  size_t place_of(const std::shared_ptr<device::Health>& device) ROUNDPIPE_REQUIRES(mutex_);
  std::vector<CheckedRun> seen() const ROUNDPIPE_REQUIRES(mutex_);
  Verdict verdict() const ROUNDPIPE_REQUIRES(mutex_);
  bool all_over() const ROUNDPIPE_REQUIRES(mutex_);
  void conclude();

  const CallPtr call_;
  const schedule::Job job_;
  const std::function<void()> dispute_;

  mutable Mutex mutex_;
  std::vector<Run> runs_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<device::Health>> devices_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::vector<char> changes_copies_ ROUNDPIPE_GUARDED_BY(mutex_);  // [device]
  size_t copies_left_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  bool void_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  bool disputed_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  std::shared_ptr<CheckedJob> first_ ROUNDPIPE_GUARDED_BY(mutex_);  // the job, once its own run is over
  std::shared_ptr<void> hold_ ROUNDPIPE_GUARDED_BY(mutex_);         // on the call, until this is decided
};
using JobCheckPtr = std::shared_ptr<JobCheck>;

// A checksum of the values of host tensors; undefined ones count as such.
uint32_t checksum_of(const std::vector<at::Tensor>& tensors);

}  // namespace roundpipe::runtime
