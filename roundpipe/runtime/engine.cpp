#include <roundpipe/runtime/engine.h>

#include <cstdlib>
#include <limits>

#include <roundpipe/core/error.h>
#include <roundpipe/runtime/update_thread.h>

namespace roundpipe::runtime {

namespace {

constexpr double kBehindAll = std::numeric_limits<double>::infinity();

}  // namespace
namespace {

std::mutex& current_mutex() {
  static std::mutex mutex;
  return mutex;
}

// Protected by current_mutex().
std::shared_ptr<Engine>& current_engine() {
  static std::shared_ptr<Engine> engine;
  return engine;
}

// Protected by current_mutex().
std::vector<std::weak_ptr<Engine>>& all_engines() {
  static std::vector<std::weak_ptr<Engine>> engines;
  return engines;
}

// REQUIRES: current_mutex() is held.
std::shared_ptr<Engine> make(const std::vector<device::DeviceSpec>& specs) {
  auto engine = std::make_shared<Engine>(specs);
  std::erase_if(all_engines(), [](const std::weak_ptr<Engine>& old) { return old.expired(); });
  all_engines().push_back(engine);
  return engine;
}

}  // namespace

Engine::Engine(const std::vector<device::DeviceSpec>& specs) : specs_(specs) {
  int index = 0;
  for (auto& device : device::make_devices(specs)) {
    workers_.push_back(std::make_unique<Worker>(index++, std::move(device)));
  }
}

void Engine::stop() {
  // Joined after the lock: what a worker does last may drop a model, which the engine is then told to forget.
  std::vector<std::unique_ptr<Worker>> ending;
  std::lock_guard lock(mutex_);
  ending.swap(workers_);
}

std::shared_ptr<Engine> Engine::current() {
  std::lock_guard lock(current_mutex());
  if (!current_engine()) {
    const char* wanted = std::getenv("ROUNDPIPE_DEVICES");
    const bool given = wanted != nullptr && *wanted != '\0';
    current_engine() = make(given ? device::parse_devices(wanted) : device::default_devices());
  }
  return current_engine();
}

std::shared_ptr<Engine> Engine::set_current(const std::vector<device::DeviceSpec>& specs) {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Engine> old;  // may join threads when dropped, so after the lock
  std::lock_guard lock(current_mutex());
  engine = make(specs);
  old = std::move(current_engine());
  current_engine() = engine;
  return engine;
}

void Engine::shut_down() {
  std::vector<std::shared_ptr<Engine>> engines;
  {
    std::lock_guard lock(current_mutex());
    current_engine().reset();
    for (const std::weak_ptr<Engine>& engine : all_engines()) engines.push_back(engine.lock());
    all_engines().clear();
  }
  for (const auto& engine : engines) {
    if (engine) engine->stop();
  }
  // All gradients have landed. What is still to be updated must not meet the end of the process.
  UpdateThread::instance().drain();
}

void Engine::submit(const std::vector<std::shared_ptr<JobRun>>& runs) {
  std::lock_guard lock(mutex_);
  if (workers_.empty())
    throw Error("[devices] the pool has been shut down with the interpreter; nothing can run any more");
  if (runs.empty()) return;
  std::vector<std::unique_lock<std::mutex>> queues;
  for (const auto& worker : workers_) queues.push_back(worker->lock());
  // Nothing goes before what has begun, on any device, or what that may wait for.
  double begun = -1;
  bool alone = true;
  for (const auto& worker : workers_) alone &= worker->look(*runs.front()->call->model, begun);
  for (const auto& run : runs) worker(run->job.device % size()).enqueue(run, alone ? begun : kBehindAll);
  for (const auto& worker : workers_) worker->enqueued();
}

void Engine::advance(int jobs) { next_device_.store((next_device_.load() + jobs) % size()); }

void Engine::forget(const ModelState& model) {
  std::lock_guard lock(mutex_);
  for (const auto& worker : workers_) worker->forget(model);
}

}  // namespace roundpipe::runtime
