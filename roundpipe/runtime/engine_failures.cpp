#include <algorithm>
#include <utility>

#include <roundpipe/core/error.h>
#include <roundpipe/device/make_devices.h>
#include <roundpipe/runtime/engine.h>

namespace roundpipe::runtime {

namespace {

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& raised) {
    return raised.what();
  }
}

}  // namespace

uint64_t Engine::changes() const {
  const MutexLock lock(pool_mutex_);
  return changes_;
}

std::vector<int> Engine::numbers(bool (Worker::*counts)() const) const {
  const MutexLock lock(pool_mutex_);
  std::vector<int> found;
  for (const auto* workers : {&workers_, &retired_}) {
    for (const auto& worker : *workers) {
      if ((worker.get()->*counts)()) found.push_back(worker->number());
    }
  }
  return found;
}

std::vector<int> Engine::workers() const { return numbers(&Worker::has_threads); }

std::vector<int> Engine::stuck_workers() const { return numbers(&Worker::is_stuck); }

void Engine::wait_idle() {
  std::vector<Worker*> all;
  {
    const MutexLock lock(pool_mutex_);
    for (const auto* workers : {&workers_, &retired_}) {
      for (const auto& worker : *workers) all.push_back(worker.get());
    }
  }
  const device::WaitingUser user;
  for (Worker* worker : all) worker->queue().drained();
}

void Engine::require_devices() const {
  if (!live().empty()) return;
  std::string why;
  for (const Failed& failed : failed()) why += concat("; ", failed.error);
  throw DeviceError(
      concat("[devices] every device of the pool has failed, so nothing can run; restore them (restore_devices() in "
             "C++, roundpipe.devices().restore() in Python), or set other ones",
             why));
}

std::vector<Engine::Failed> Engine::failed() const {
  const MutexLock lock(pool_mutex_);
  std::vector<Failed> all;
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (std::ranges::find(live_, workers_[i].get()) != live_.end()) continue;
    const device::Device& device = workers_[i]->device();
    all.push_back({static_cast<int>(i), device.name(), text_of(device.health()->failure())});
  }
  return all;
}

void Engine::see_to_failures() {
  std::vector<Aftermath> dropped;  // after the lock
  settle_disputes();
  const MutexLock lock(overseen_);
  dropped = look();
}

std::vector<Engine::Aftermath> Engine::look() {
  std::vector<Aftermath> seen;
  const std::vector<Worker*> devices = live();
  for (Worker* worker : devices) worker->watch();
  for (Worker* worker : devices) {
    if (worker->device().health()->failed()) seen.push_back(take_out(*worker));
  }
  return seen;
}

Engine::Aftermath Engine::take_out(Worker& failed) {
  Aftermath aftermath = remove(failed);
  const std::exception_ptr error = failed.device().health()->failure();
  for (const CallPtr& call : aftermath.failing) call->fail(error);
  for (const JobPtr& run : aftermath.attempted_again) run->attempt->abandon();
  for (const JobPtr& run : aftermath.given_up) {
    if (run->give_up()) run->call->job_over();
  }
  return aftermath;
}

Engine::Aftermath Engine::remove(Worker& failed) {
  const MutexLock lock(mutex_);
  std::vector<Worker*> devices;
  {
    const MutexLock pool(pool_mutex_);
    std::erase(live_, &failed);
    ++changes_;
    devices = live_;
  }
  std::vector<std::unique_lock<Mutex>> queues;
  queues.emplace_back(failed.queue().mutex());
  for (Worker* worker : devices) queues.emplace_back(worker->queue().mutex());

  Aftermath aftermath;
  const bool may_go_on = !devices.empty() && !stopping_;
  const auto goes_on = [&](const JobRun& run) {
    return may_go_on && run.call->options.fault_tolerant && !run.call->failed();
  };
  const auto fails = [&](const JobPtr& run) {
    if (std::ranges::find(aftermath.failing, run->call) == aftermath.failing.end()) {
      aftermath.failing.push_back(run->call);
    }
  };
  for (const JobPtr& run : std::vector<JobPtr>(failed.queue().unfinished())) {
    failed.queue().forget(run);
    if (goes_on(*run)) {
      aftermath.lost.push_back(run);
    } else {
      aftermath.given_up.push_back(run);
      fails(run);
    }
  }
  const bool any_lost = !aftermath.lost.empty();
  for (Worker* worker : devices) {
    for (const JobPtr& run : std::vector<JobPtr>(worker->queue().unfinished())) {
      if (!goes_on(*run)) {
        fails(run);
        continue;
      }
      // It may wait for a lost job, which could not run before it ends.
      const auto& jobs = worker->queue().jobs();
      if (!any_lost || run->slot < 0 || std::ranges::find(jobs, run) == jobs.end()) continue;
      worker->queue().forget(run);
      aftermath.lost.push_back(run);
    }
  }
  attempt_again(devices, aftermath);
  for (Worker* worker : devices) worker->enqueued();
  return aftermath;
}

void Engine::attempt_again(const std::vector<Worker*>& devices, Aftermath& aftermath) {
  for (const JobPtr& run : aftermath.lost) {
    const JobPtr attempt = run->again();
    if (!attempt) continue;
    aftermath.attempted_again.push_back(run);
    const auto least = std::ranges::min_element(
        devices, {}, [](Worker* worker) ROUNDPIPE_NOT_ANALYZED { return worker->queue().jobs().size(); });
    attempt->job.device = static_cast<int>(least - devices.begin());
    attempt->attempt->runs_on((*least)->device().health());
    (*least)->queue().enqueue(attempt, /*begun=*/-1);
  }
}

std::vector<std::string> Engine::restore() {
  require_engine();
  require_callers_thread();
  std::vector<Aftermath> dropped;  // after the lock
  const MutexLock lock(overseen_);
  dropped = look();
  std::vector<std::string> names;
  for (const Failed& gone : failed()) {
    device::DeviceSpec spec = specs_[static_cast<size_t>(gone.index)];
    spec.faults.clear();
    std::unique_ptr<Worker> worker = make_worker(gone.index, std::move(device::make_devices({spec}).front()));
    const MutexLock submissions(mutex_);
    const MutexLock pool(pool_mutex_);
    std::vector<Worker*> live;
    for (std::unique_ptr<Worker>& place : workers_) {
      if (place->device().name() == gone.name) {
        retired_.push_back(std::exchange(place, std::move(worker)));
      } else if (std::ranges::find(live_, place.get()) == live_.end()) {
        continue;
      }
      live.push_back(place.get());
    }
    live_ = std::move(live);
    ++changes_;
    names.push_back(gone.name);
  }
  std::vector<Worker*> retired;
  {
    const MutexLock pool(pool_mutex_);
    for (const auto& worker : retired_) retired.push_back(worker.get());
  }
  for (Worker* worker : retired) worker->stop();
  return names;
}

void Engine::release_hangs() {
  const MutexLock lock(pool_mutex_);
  for (const auto* workers : {&workers_, &retired_}) {
    for (const auto& worker : *workers) worker->device().release_hang();
  }
}

}  // namespace roundpipe::runtime
