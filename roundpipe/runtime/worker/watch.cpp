#include <roundpipe/runtime/worker/watch.h>

#include <algorithm>
#include <utility>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/error.h>

namespace roundpipe::runtime {

Watch::Scope::Scope(Watch& watch, const JobRun& run, int microbatch) : watch_(watch) {
  Work work{run.call->model->name, run.job, microbatch, nullptr};
  const MutexLock lock(watch_.mutex_);
  while (!watch_.work_.empty() && watch_.work_.front().done && watch_.work_.front().done->complete()) {
    watch_.work_.pop_front();
  }
  watch_.work_.push_back(std::move(work));
  watch_.since_ms_ = now_ms();
}

Watch::Scope::~Scope() {
  const MutexLock lock(watch_.mutex_);
  // It ended with an error.
  if (!watch_.work_.back().done) watch_.work_.pop_back();
}

void Watch::issued(device::EventPtr done) {
  const MutexLock lock(mutex_);
  work_.back().done = std::move(done);
}

void Watch::pause(int change) {
  const MutexLock lock(mutex_);
  pauses_ += change;
  since_ms_ = now_ms();
}

std::optional<std::string> Watch::overdue(double now_ms, double limit_ms) const {
  const MutexLock lock(mutex_);
  double since_ms = since_ms_;
  for (const Work& work : work_) {
    if (work.done && work.done->complete()) {
      // The device does one after the other.
      since_ms = std::max(since_ms, work.done->time_ms());
      continue;
    }
    if (now_ms - since_ms <= limit_ms || (pauses_ > 0 && !work.done)) return std::nullopt;
    return concat("microbatch ", work.microbatch, " of the job \"", schedule::to_string(work.job), "\" of ", work.model,
                  work.done ? ", which it has been given whole" : ", of which it has not been given all");
  }
  return std::nullopt;
}

}  // namespace roundpipe::runtime
