#include <roundpipe/runtime/engine.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <thread>
#include <utility>

#include <ATen/Parallel.h>

#include <roundpipe/core/error.h>
#include <roundpipe/device/make_devices.h>
#include <roundpipe/optim/thread_pool.h>
#include <roundpipe/runtime/step/update_thread.h>
#include <roundpipe/torch_compat/vector_math.h>

namespace roundpipe::runtime {

namespace {

// Threads that end pools whose last user was one of their own threads: a call that held a loss function, which held the
// model, for example. Never destroyed.
struct Graves {
  Mutex mutex;
  std::vector<std::thread> threads ROUNDPIPE_GUARDED_BY(mutex);
};
Graves& graves() {
  static auto* instance = new Graves;
  return *instance;
}

void end_pool(Engine* engine) {
  if (!is_engine_thread()) {
    delete engine;
    return;
  }
  const MutexLock lock(graves().mutex);
  graves().threads.emplace_back([engine] { delete engine; });
}

// Waits for pools that are ending in this way. Not on an engine thread.
void wait_for_ended_pools() {
  std::vector<std::thread> threads;
  {
    const MutexLock lock(graves().mutex);
    threads.swap(graves().threads);
  }
  for (std::thread& thread : threads) thread.join();
}

constexpr double kBehindAll = std::numeric_limits<double>::infinity();

// Never destroyed: the user's threads may ask for the pool while the process ends.
struct Pools {
  Mutex mutex;
  std::shared_ptr<Engine> current ROUNDPIPE_GUARDED_BY(mutex);
  std::vector<std::weak_ptr<Engine>> all ROUNDPIPE_GUARDED_BY(mutex);
  bool ends_at_exit ROUNDPIPE_GUARDED_BY(mutex) = false;

  std::shared_ptr<Engine> make(const std::vector<device::DeviceSpec>& specs) ROUNDPIPE_REQUIRES(mutex) {
    require_engine();
    // Registered late, so that it runs before most of what libraries and the user's statics do at process exit.
    if (!std::exchange(ends_at_exit, true)) std::atexit([] { Engine::shut_down(); });
    const std::shared_ptr<Engine> engine(new Engine(specs), end_pool);
    std::erase_if(all, [](const std::weak_ptr<Engine>& old) { return old.expired(); });
    all.push_back(engine);
    optim::ThreadPool::leave_cores(engine->size());
    return engine;
  }
};
Pools& pools() {
  static auto* instance = new Pools;
  return *instance;
}

// In a child made by fork, the first thread that asks torch for its thread pool makes a new one, and torch fails if
// another asks meanwhile. So ask on one thread before others exist; not on this one, whose settings stay as they are.
void renew_torch_threads() {
  std::thread([threads = at::get_num_threads()] { at::set_num_threads(threads); }).join();
}

}  // namespace

// In this order, since devices have threads.
Engine::Engine(const std::vector<device::DeviceSpec>& specs)
    : Engine(specs, (engine_begins(), renew_torch_threads(), device::make_devices(specs))) {}

Engine::Engine(const std::vector<device::DeviceSpec>& specs, std::vector<std::unique_ptr<device::Device>> devices)
    : specs_(specs), meter_(static_cast<int>(devices.size())) {
  engine_begins();
  torch_compat::settle_vector_math();
  int index = 0;
  for (auto& device : devices) {
    LinkObservers observers{meter_.link(index, LinkWay::kUp), meter_.link(index, LinkWay::kDown)};
    workers_.push_back(std::make_unique<Worker>(index++, std::move(device), std::move(observers)));
  }
}

Engine::~Engine() {
  // The threads of the workers are in another process.
  if (!is_left_behind()) return;
  for (std::unique_ptr<Worker>& worker : workers_) static_cast<void>(worker.release());
}

void Engine::stop() {
  // A submission that has begun ends first; later ones are refused.
  {
    const MutexLock lock(mutex_);
  }
  for (const auto& worker : workers_) worker->stop();
}

std::shared_ptr<Engine> Engine::current() {
  require_engine();
  const MutexLock lock(pools().mutex);
  if (!pools().current) {
    engine_begins();
    const char* wanted = std::getenv("ROUNDPIPE_DEVICES");
    const bool given = wanted != nullptr && *wanted != '\0';
    pools().current = pools().make(given ? device::parse_devices(wanted) : device::default_devices());
  }
  return pools().current;
}

std::shared_ptr<Engine> Engine::set_current(const std::vector<device::DeviceSpec>& specs) {
  require_engine();
  wait_for_ended_pools();
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Engine> old;  // dropped after the lock is released, since that may join threads
  const MutexLock lock(pools().mutex);
  // The new pool must not find memory taken that the old one keeps for later jobs.
  for (int i = 0; pools().current && i < pools().current->size(); ++i) pools().current->worker(i).trim();
  engine = pools().make(specs);
  old = std::move(pools().current);
  pools().current = engine;
  return engine;
}

void Engine::shut_down() {
  if (is_left_behind()) return;
  static Mutex one_at_a_time;
  const MutexLock alone(one_at_a_time);
  std::vector<std::shared_ptr<Engine>> engines;
  {
    const MutexLock lock(pools().mutex);
    engine_ends();
    pools().current.reset();
    for (const std::weak_ptr<Engine>& engine : pools().all) engines.push_back(engine.lock());
    pools().all.clear();
  }
  for (const auto& engine : engines) {
    if (engine) engine->stop();
  }
  // All gradients have landed. Updates that are left must end before the process does.
  UpdateThread::instance().stop();
  wait_for_ended_pools();
}

void Engine::submit(const std::vector<std::shared_ptr<JobRun>>& runs) {
  const MutexLock lock(mutex_);
  require_engine();
  if (runs.empty()) return;
  std::vector<std::unique_lock<Mutex>> queues;
  for (const auto& worker : workers_) queues.emplace_back(worker->queue().mutex());
  // No job goes before one that has begun on any device, nor before a job which that one may wait for.
  double begun = -1;
  bool alone = true;
  for (const auto& worker : workers_) alone &= worker->queue().look(*runs.front()->call->model, begun);
  for (const auto& run : runs) worker(run->job.device % size()).queue().enqueue(run, alone ? begun : kBehindAll);
  for (const auto& worker : workers_) worker->enqueued();
}

bool Engine::fused_waits(const Call& call) {
  return std::ranges::any_of(workers_, [&](const auto& worker) {
    JobQueue& queue = worker->queue();
    const MutexLock lock(queue.mutex());
    return std::ranges::any_of(queue.jobs(), [&](const JobQueue::JobPtr& run) {
      return run->call.get() == &call && run->slot < 0 && run->job.phase == schedule::Phase::kFused;
    });
  });
}

void Engine::advance(int jobs) { next_device_.store((next_device_.load() + jobs) % size()); }

}  // namespace roundpipe::runtime
