#include <roundpipe/runtime/step/update_thread.h>

#include <thread>

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
    std::lock_guard lock(mutex_);
    if (stopped_) return false;
    ready_.insert(std::move(work));
  }
  changed_.notify_all();
  return true;
}

void UpdateThread::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ready_.empty() && !working_; });
}

void UpdateThread::stop() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ready_.empty() && !working_; });
  stopped_ = true;
}

void UpdateThread::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !ready_.empty(); });
    std::function<void()> work = std::move(ready_.extract(ready_.begin()).mapped());
    working_ = true;
    lock.unlock();
    device::run_callback(work, nullptr);
    work = nullptr;  // may hold the last reference to a model
    lock.lock();
    working_ = false;
    if (ready_.empty()) changed_.notify_all();
  }
}

}  // namespace roundpipe::runtime
