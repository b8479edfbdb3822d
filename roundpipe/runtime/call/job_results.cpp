#include <roundpipe/runtime/call/job_results.h>

#include <utility>

#include <roundpipe/core/error.h>

namespace roundpipe::runtime {

bool JobResults::claim(int attempt, const JobResult& result) {
  return deliver(attempt, result, [] {});
}

bool JobResults::deliver(int attempt, const JobResult& result, const std::function<void()>& publish) {
  const MutexLock lock(mutex_);
  if (over_ || attempt != attempt_ || !delivered_.insert(result).second) return false;
  publish();
  return true;
}

void JobResults::read(int attempt, const std::function<void()>& look) {
  const MutexLock lock(mutex_);
  if (over_ || attempt != attempt_) throw Cancelled("[devices] this attempt to run a job is not needed any more");
  look();
}

bool JobResults::finish(int attempt, const std::function<void()>& publish) {
  const MutexLock lock(mutex_);
  if (over_ || attempt != attempt_) return false;
  over_ = true;
  publish();
  return true;
}

std::optional<int> JobResults::begin_again() {
  const MutexLock lock(mutex_);
  if (over_) return std::nullopt;
  std::erase_if(delivered_, [](const JobResult& result) { return result.kind == JobResult::Kind::kBuffers; });
  return ++attempt_;
}

bool JobResults::give_up() {
  const MutexLock lock(mutex_);
  return !std::exchange(over_, true);
}

}  // namespace roundpipe::runtime
