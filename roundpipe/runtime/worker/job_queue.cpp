#include <roundpipe/runtime/worker/job_queue.h>

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

namespace roundpipe::runtime {

using device::EventPtr;

bool JobQueue::look(const ModelState& model, double& begun) const {
  bool alone = true;
  for (const JobPtr& job : jobs_) {
    if (job->call->model.get() != &model) {
      alone = false;
    } else if (job->slot >= 0) {
      begun = std::max(begun, job->position);
    }
  }
  return alone;
}

void JobQueue::enqueue(JobPtr job, double begun) {
  auto place = jobs_.end();
  while (place != jobs_.begin()) {
    const JobRun& before = **std::prev(place);
    if (before.slot >= 0 || before.era < job->era) break;
    if (before.era == job->era && (before.position <= begun || std::pair(before.position, before.number) <=
                                                                   std::pair(job->position, job->number))) {
      break;
    }
    --place;
  }
  unfinished_.push_back(job);
  jobs_.insert(place, std::move(job));
}

JobQueue::JobPtr JobQueue::prefetched() const { return jobs_.size() >= 2 && jobs_[1]->slot >= 0 ? jobs_[1] : nullptr; }

JobQueue::JobPtr JobQueue::wait_for_job() {
  const MutexLock lock(mutex_);
  runs_ = false;
  while (jobs_.empty() ? !stopping_ || releasing_ > 0 : jobs_.front()->slot < 0) changed_.wait(mutex_);
  if (jobs_.empty()) return nullptr;
  runs_ = true;
  return jobs_.front();
}

JobQueue::JobPtr JobQueue::running() {
  const MutexLock lock(mutex_);
  return jobs_.front();
}

JobQueue::Next JobQueue::run_alone() {
  const MutexLock lock(mutex_);
  alone_ = true;
  Next next;
  next.job = prefetched();
  if (next.job) next.begun = std::exchange(next.job->begun, {});
  return next;
}

void JobQueue::admit(const JobRun& job, const EventPtr& done, const std::string& device) {
  const MutexLock lock(mutex_);
  if (!jobs_.empty() && jobs_.front().get() == &job) return;
  TORCH_CHECK_WITH(OutOfMemoryError, !alone_, "[", device, "] the running job needs all memory for now");
  for (const JobPtr& waiting : jobs_) {
    if (waiting.get() == &job) waiting->begun.push_back(done);
  }
}

void JobQueue::pop() {
  ++releasing_;
  jobs_.pop_front();
  alone_ = false;
  next_staged_ = 0;
  runs_ = false;
}

void JobQueue::released(const JobPtr& job, bool over) {
  --releasing_;
  if (over) forget(job);
}

bool JobQueue::wait_released() {
  const MutexLock lock(mutex_);
  if (releasing_ == 0) return false;
  while (releasing_ > 0) changed_.wait(mutex_);
  return true;
}

void JobQueue::stop() {
  const MutexLock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
}

bool JobQueue::drained() {
  const MutexLock lock(mutex_);
  while (!left_ && (!jobs_.empty() || releasing_ > 0)) changed_.wait(mutex_);
  return jobs_.empty() && releasing_ == 0;
}

void JobQueue::leave() {
  const MutexLock lock(mutex_);
  left_ = true;
  changed_.notify_all();
}

bool JobQueue::is_stuck() const {
  const MutexLock lock(mutex_);
  return left_ && (!jobs_.empty() || releasing_ > 0);
}

}  // namespace roundpipe::runtime
