#include <roundpipe/runtime/engine.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <thread>
#include <utility>

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>

#include <roundpipe/cluster/channel.h>
#include <roundpipe/core/error.h>
#include <roundpipe/device/fp16_accumulation.h>
#include <roundpipe/device/make_devices.h>
#include <roundpipe/memory/host_arena.h>
#include <roundpipe/optim/thread_pool.h>
#include <roundpipe/runtime/step/function_thread.h>
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

void end_at_exit() {
  if (is_engine_thread() && !is_left_behind()) {
    std::fputs(
        "[engine] a layer or a loss function has called exit, which waits for the thread that it runs on; expected an "
        "exception there, and exit where it arrives\n",
        stderr);
    std::abort();
  }
  Engine::shut_down();
}

constexpr double kBehindAll = std::numeric_limits<double>::infinity();

// Never destroyed: the user's threads may ask for the pool while the process ends.
struct Pools {
  Mutex mutex;
  std::shared_ptr<Engine> current ROUNDPIPE_GUARDED_BY(mutex);
  std::vector<std::weak_ptr<Engine>> all ROUNDPIPE_GUARDED_BY(mutex);
  bool ends_at_exit ROUNDPIPE_GUARDED_BY(mutex) = false;
  device::Fp16AccumulationSwitch fp16_accumulation ROUNDPIPE_GUARDED_BY(mutex);

  std::shared_ptr<Engine> make(const std::vector<device::DeviceSpec>& specs, bool adds_in_fp16)
      ROUNDPIPE_REQUIRES(mutex) {
    require_engine();
    // Registered late, so that it runs before most of what libraries and the user's statics do at process exit; after
    // torch's table of accelerators is made, since threads that end look there.
    if (!std::exchange(ends_at_exit, true)) {
      at::getAccelerator(false);
      std::atexit(end_at_exit);
    }
    const std::shared_ptr<Engine> engine(new Engine(specs, adds_in_fp16), end_pool);
    std::erase_if(all, [](const std::weak_ptr<Engine>& old) { return old.expired(); });
    all.push_back(engine);
    optim::ThreadPool::leave_cores(engine->size());
    return engine;
  }

  // Those that have not ended.
  std::vector<std::shared_ptr<Engine>> living() const ROUNDPIPE_REQUIRES(mutex) {
    std::vector<std::shared_ptr<Engine>> found;
    for (const std::weak_ptr<Engine>& pool : all) {
      if (std::shared_ptr<Engine> engine = pool.lock()) found.push_back(std::move(engine));
    }
    return found;
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
Engine::Engine(const std::vector<device::DeviceSpec>& specs, bool fp16_accumulation)
    : Engine(specs, (engine_begins(), renew_torch_threads(), device::make_devices(specs)), fp16_accumulation) {}

Engine::Engine(const std::vector<device::DeviceSpec>& specs, std::vector<std::unique_ptr<device::Device>> devices,
               bool fp16_accumulation)
    : specs_(specs), fp16_accumulation_(fp16_accumulation), meter_(static_cast<int>(devices.size())) {
  engine_begins();
  torch_compat::settle_vector_math();
  double watchdog_ms = 0;
  for (const auto& device : devices) {
    const double own_ms = device->watchdog_ms();
    if (own_ms > 0 && (watchdog_ms == 0 || own_ms < watchdog_ms)) watchdog_ms = own_ms;
  }
  constexpr double kLooks = 4;  // within the time of the shortest watchdog
  overseer_ = std::make_shared<Overseer>([this] { see_to_failures(); }, watchdog_ms / kLooks);
  int index = 0;
  for (auto& device : devices) {
    std::unique_ptr<Worker> worker = make_worker(index++, std::move(device));
    const MutexLock lock(pool_mutex_);
    live_.push_back(worker.get());
    workers_.push_back(std::move(worker));
  }
}

Engine::~Engine() {
  if (!is_left_behind()) stop();
  const MutexLock lock(pool_mutex_);
  for (auto* workers : {&workers_, &retired_}) {
    for (std::unique_ptr<Worker>& worker : *workers) {
      // Its threads cannot be ended, or are in another process.
      if (is_left_behind() || worker->is_stuck()) static_cast<void>(worker.release());
    }
  }
  if (is_left_behind()) {
    static_cast<void>(new std::shared_ptr<Overseer>(overseer_));  // its thread is in another process
  } else {
    memory::HostArena::trim_values();  // its threads may have let go of values after their model had ended
  }
}

std::unique_ptr<Worker> Engine::make_worker(int index, std::unique_ptr<device::Device> device) {
  static std::atomic<int> next_number{0};
  device->health()->on_failure([overseer = std::weak_ptr(overseer_)] {
    if (const auto awake = overseer.lock()) awake->wake();
  });
  LinkObservers observers{meter_.link(index, LinkWay::kUp), meter_.link(index, LinkWay::kDown)};
  return std::make_unique<Worker>(index, next_number++, std::move(device), std::move(observers));
}

void Engine::stop() {
  const device::WaitingUser user;
  // A submission that has begun ends first; later ones are refused.
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  std::vector<Worker*> all;
  {
    const MutexLock lock(pool_mutex_);
    for (const auto* workers : {&workers_, &retired_}) {
      for (const auto& worker : *workers) all.push_back(worker.get());
    }
  }
  // Devices may still fail meanwhile, which the overseer sees.
  for (Worker* worker : all) worker->stop();
  overseer_->stop();
}

std::shared_ptr<Engine> Engine::current() {
  require_engine();
  const MutexLock lock(pools().mutex);
  if (!pools().current) {
    engine_begins();
    const char* wanted = std::getenv("ROUNDPIPE_DEVICES");
    const bool given = wanted != nullptr && *wanted != '\0';
    const bool adds_in_fp16 = device::wants_fp16_accumulation();
    pools().current = pools().make(given ? device::parse_devices(wanted) : device::default_devices(), adds_in_fp16);
    pools().fp16_accumulation.turn(adds_in_fp16);
  }
  return pools().current;
}

std::shared_ptr<Engine> Engine::set_current(const std::vector<device::DeviceSpec>& specs,
                                            std::optional<bool> fp16_accumulation) {
  require_engine();
  require_callers_thread();
  wait_for_ended_pools();
  const bool adds_in_fp16 = fp16_accumulation ? *fp16_accumulation : device::wants_fp16_accumulation();
  std::shared_ptr<Engine> engine;
  // Dropped after the lock is released, since that may join threads.
  std::shared_ptr<Engine> old;
  std::vector<std::shared_ptr<Engine>> living;
  {
    const MutexLock lock(pools().mutex);
    // The new pool must not find memory taken that the old one keeps for later jobs.
    for (int i = 0; pools().current && i < pools().current->pool_size(); ++i) pools().current->pool_worker(i).trim();
    engine = pools().make(specs, adds_in_fp16);
  }
  while (true) {
    {
      const MutexLock lock(pools().mutex);
      device::Fp16AccumulationSwitch& torch = pools().fp16_accumulation;
      living = torch.turns(adds_in_fp16) ? pools().living() : std::vector<std::shared_ptr<Engine>>{};
      if (while_idle(living, [&] { torch.turn(adds_in_fp16); })) {
        old = std::move(pools().current);
        pools().current = engine;
        return engine;
      }
    }
    // Without the lock, since layers and losses may ask for the pool.
    for (const std::shared_ptr<Engine>& pool : living) pool->wait_idle();
    living.clear();
  }
}

bool Engine::while_idle(const std::vector<std::shared_ptr<Engine>>& engines, const std::function<void()>& work) {
  std::vector<std::unique_lock<Mutex>> submissions;
  for (const std::shared_ptr<Engine>& engine : engines) submissions.emplace_back(engine->mutex_);
  for (const std::shared_ptr<Engine>& engine : engines) {
    for (Worker* worker : engine->live()) {
      const MutexLock lock(worker->queue().mutex());
      if (!worker->queue().jobs().empty()) return false;
    }
  }
  work();
  return true;
}

void Engine::shut_down() {
  if (is_left_behind()) return;
  FunctionThread::drain_any();
  static Mutex one_at_a_time{Mutex::Kind::kTurn};  // what a wait for the devices lets go on may be the user's
  const MutexLock alone(one_at_a_time);
  std::vector<std::shared_ptr<Engine>> engines;
  {
    const MutexLock lock(pools().mutex);
    engine_ends();
    engines = pools().living();
    pools().all.clear();
    pools().current.reset();  // not the last reference
  }
  for (const auto& engine : engines) engine->stop();
  // All gradients have landed. Steps that are left must end before the process does.
  cluster::Channel::drain_all();
  UpdateThread::instance().stop();
  wait_for_ended_pools();
  const MutexLock lock(pools().mutex);
  pools().fp16_accumulation.restore();
}

std::vector<Worker*> Engine::live() const {
  const MutexLock lock(pool_mutex_);
  return live_;
}

int Engine::size() const { return static_cast<int>(live().size()); }

Worker& Engine::pool_worker(int index) {
  require_engine();
  const MutexLock lock(pool_mutex_);
  return *workers_[static_cast<size_t>(index)];
}

Worker& Engine::worker(int index) {
  const std::vector<Worker*> devices = live();
  if (devices.empty()) return pool_worker(index % pool_size());
  require_engine();
  return *devices[static_cast<size_t>(index) % devices.size()];
}

void Engine::submit(const std::vector<JobPtr>& runs) {
  const MutexLock lock(mutex_);
  require_engine();
  if (runs.empty()) return;
  require_devices();
  device::require_fp16_accumulation(fp16_accumulation_);
  const std::vector<Worker*> devices = live();
  std::vector<std::unique_lock<Mutex>> queues;
  for (Worker* worker : devices) queues.emplace_back(worker->queue().mutex());
  // No job goes before one that has begun on any device, nor before a job which that one may wait for.
  double begun = -1;
  bool alone = true;
  const ModelState* const model = runs.front()->call->model.get();
  for (Worker* worker : devices) alone &= worker->queue().look(*model, begun);
  if (!alone || model != era_model_) ++era_;
  era_model_ = model;
  for (const JobPtr& run : runs) {
    Worker& worker = *devices[static_cast<size_t>(run->job.device) % devices.size()];
    run->era = era_;
    run->number = next_job_++;
    run->attempt->runs_on(worker.device().health());
    worker.queue().enqueue(run, alone ? begun : kBehindAll);
  }
  for (Worker* worker : devices) worker->enqueued();
}

bool Engine::fused_waits(const Call& call) {
  return std::ranges::any_of(live(), [&](Worker* worker) {
    JobQueue& queue = worker->queue();
    const MutexLock lock(queue.mutex());
    return std::ranges::any_of(queue.jobs(), [&](const JobPtr& run) {
      return run->call.get() == &call && run->slot < 0 && run->job.phase == schedule::Phase::kFused;
    });
  });
}

void Engine::advance(int jobs) { next_device_.store((next_device_.load() + jobs) % std::max(1, size())); }

}  // namespace roundpipe::runtime
