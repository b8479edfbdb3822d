#include <algorithm>
#include <utility>

#include <roundpipe/runtime/engine.h>

namespace roundpipe::runtime {

void Engine::dispute(const JobPtr& run) {
  {
    const MutexLock lock(pool_mutex_);
    disputes_.push_back(run);
  }
  overseer_->wake();
}

void Engine::settle_disputes() {
  std::vector<JobPtr> disputes;
  {
    const MutexLock lock(pool_mutex_);
    disputes.swap(disputes_);
  }
  for (const JobPtr& run : disputes) settle(run);
}

void Engine::settle(const JobPtr& run) {
  const JobCheckPtr& check = run->attempt->check();
  std::vector<JobPtr> runs;
  {
    const MutexLock lock(mutex_);
    const std::vector<Worker*> devices = stopping_ ? std::vector<Worker*>() : live();
    const auto disputing = check->devices();
    // The devices that disagree first, then the others.
    std::vector<Worker*> chosen;
    for (Worker* worker : devices) {
      const auto& health = worker->device().health();
      if (std::ranges::find(disputing, health) == disputing.end()) continue;
      chosen.push_back(worker);
    }
    const std::vector<Worker*> disagreeing = chosen;
    for (Worker* worker : devices) {
      if (chosen.size() > disputing.size()) break;
      if (std::ranges::find(chosen, worker) == chosen.end()) chosen.push_back(worker);
    }
    for (size_t i = 0; i < chosen.size(); ++i) runs.push_back(run->to_check(check));
    run->call->add_jobs(static_cast<int>(runs.size()));
    check->expect_copies(disagreeing.size());
    for (Worker* worker : disagreeing) {
      worker->try_copies([check, health = worker->device().health()](bool same) { check->copied(health, same); });
    }
    std::vector<std::unique_lock<Mutex>> queues;
    for (Worker* worker : devices) queues.emplace_back(worker->queue().mutex());
    for (size_t i = 0; i < runs.size(); ++i) {
      runs[i]->job.device = static_cast<int>(std::ranges::find(devices, chosen[i]) - devices.begin());
      runs[i]->attempt->runs_on(chosen[i]->device().health());
      // What it waits for is complete, so that it may go before all jobs that have not begun.
      chosen[i]->queue().enqueue(runs[i], /*begun=*/-1);
    }
    for (Worker* worker : devices) worker->enqueued();
  }
  if (runs.empty()) check->decide();
}

}  // namespace roundpipe::runtime
