#include <roundpipe/runtime/update_thread.h>

#include <thread>

namespace roundpipe::runtime {

UpdateThread& UpdateThread::instance() {
  // Never destroyed: a process may end without drain().
  static auto* instance = new UpdateThread;
  return *instance;
}

UpdateThread::UpdateThread() {
  std::thread([this] { run(); }).detach();
}

void UpdateThread::submit(const Order& order, std::function<void()> work) {
  {
    std::lock_guard lock(mutex_);
    ready_.emplace(order, std::move(work));
  }
  changed_.notify_all();
}

void UpdateThread::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ready_.empty() && !working_; });
}

void UpdateThread::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !ready_.empty(); });
    std::function<void()> work = std::move(ready_.extract(ready_.begin()).mapped());
    working_ = true;
    lock.unlock();
    work();
    work = nullptr;  // it may be the last to hold a model
    lock.lock();
    working_ = false;
    if (ready_.empty()) changed_.notify_all();
  }
}

}  // namespace roundpipe::runtime
