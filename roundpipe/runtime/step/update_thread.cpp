#include <roundpipe/runtime/step/update_thread.h>

#include <memory>
#include <thread>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/device/event.h>
#include <roundpipe/optim/cores.h>

namespace roundpipe::runtime {

UpdateThread& UpdateThread::instance() {
  // Never destroyed: a process may end without stop().
  static auto* instance = new UpdateThread;
  return *instance;
}

UpdateThread::UpdateThread() {
  std::thread([this] {
    become_engine_thread();
    optim::lower_own_priority();
    run();
  }).detach();
}

UpdateThread::Work UpdateThread::prepare(const Order& order, std::function<void()> work) {
  std::multimap<Order, std::function<void()>> one;
  return one.extract(one.emplace(order, std::move(work)));
}

bool UpdateThread::submit(Work& work) noexcept {
  {
    const MutexLock lock(mutex_);
    if (stopped_) return false;
    ready_.insert(std::move(work));
  }
  changed_.notify_all();
  return true;
}

void UpdateThread::drain() {
  const MutexLock lock(mutex_);
  while (!ready_.empty() || working_) changed_.wait(mutex_);
}

void UpdateThread::stop() {
  const MutexLock lock(mutex_);
  while (!ready_.empty() || working_) changed_.wait(mutex_);
  stopped_ = true;
}

void UpdateThread::run() {
  std::shared_ptr<void> attached;
  while (true) {
    std::function<void()> work;
    {
      const MutexLock lock(mutex_);
      while (ready_.empty()) changed_.wait(mutex_);
      work = std::move(ready_.extract(ready_.begin()).mapped());
      working_ = true;
    }
    // Not at the start: a process that ends may start the thread only to stop it.
    if (!attached) attached = frontend().attach_thread();
    device::run_callback(work, nullptr);
    work = nullptr;  // may hold the last reference to a model
    const MutexLock lock(mutex_);
    working_ = false;
    if (ready_.empty()) changed_.notify_all();
  }
}

}  // namespace roundpipe::runtime
