#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include <roundpipe/device/event_list.h>
#include <roundpipe/device/health.h>
#include <roundpipe/runtime/call/call.h>
#include <roundpipe/runtime/call/job_check.h>
#include <roundpipe/runtime/call/job_results.h>

namespace roundpipe::runtime {

// One attempt to run a job on a device. Everything that the job waits for goes through here, and so do its results, so
// that an attempt can be abandoned without its call: its events fail, and what it still delivers is dropped.
//
// Its errors fail the call; if its device has failed, that is the error. In a call that is fault tolerant, errors of a
// device that has failed only break the attempt, and the pool begins another one (see Engine).
//
// Thread safety: any thread.
class Attempt : public std::enable_shared_from_this<Attempt> {
 public:
  Attempt(CallPtr call, std::shared_ptr<JobResults> results, int number);

  // Makes this attempt one at run number `run` of a job that is checked. Of any run but the first, checksums remain,
  // and nothing is delivered.
  void belongs_to(JobCheckPtr check, int run);
  const JobCheckPtr& check() const { return check_; }
  int checked_run() const { return run_; }
  bool only_checks() const { return run_ > 0; }

  // The device that runs it. Call it before the attempt can fail.
  void runs_on(std::shared_ptr<device::Health> health);

  // An event that fails with the attempt, or with its call.
  device::EventPtr new_event();
  // An event that completes as `event` does, unless the attempt is abandoned first; null for null.
  device::EventPtr follow(const device::EventPtr& event);
  // Runs `callback` once all of `events` have fired. If one fails, or the callback throws, the attempt fails with that
  // error. Null events count as fired.
  void then(const std::vector<device::EventPtr>& events, device::Event::Callback callback);
  // Runs `work` now; an error fails the attempt. Returns whether it succeeded.
  bool succeeds(const std::function<void()>& work) noexcept;

  void fail(const std::exception_ptr& error);
  // Fails all of its events. Does nothing for a call that is not fault tolerant.
  void abandon();
  // Why it should not go on: it was abandoned, or its call has failed; null if it should.
  std::exception_ptr error() const;

  // The tensors of a result, on the host, for a check.
  using Contents = std::function<std::vector<at::Tensor>()>;
  // Runs `publish` once `landed` has fired, if `result` is still to be delivered, and then fires `done` (null:
  // nothing). `publish` must not wait.
  void deliver(const device::EventPtr& landed, const JobResult& result, Contents contents,
               std::function<void()> publish, device::EventPtr done);
  // See JobResults::read.
  void read(const std::function<void()>& look) { results_->read(number_, look); }
  // Whether the caller may deliver `result`.
  bool claim(const JobResult& result, const Contents& contents);
  // Ends the job with this attempt, see JobResults::finish. Returns false, too, if the attempt is broken.
  bool finish(const std::function<void()>& publish);
  const std::shared_ptr<JobResults>& results() const { return results_; }

 private:
  const CallPtr call_;
  const std::shared_ptr<JobResults> results_;
  const int number_;
  std::shared_ptr<device::Health> health_;
  JobCheckPtr check_;
  int run_ = 0;
  std::atomic<bool> broken_{false};
  mutable Mutex mutex_;
  std::exception_ptr abandoned_ ROUNDPIPE_GUARDED_BY(mutex_);
  device::EventList events_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace roundpipe::runtime
