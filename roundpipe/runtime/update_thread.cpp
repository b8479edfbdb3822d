#include <roundpipe/runtime/update_thread.h>

#include <thread>

namespace roundpipe::runtime {

UpdateThread& UpdateThread::instance() {
  // Never destroyed: at exit a step may still be under way.
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
  changed_.notify_one();
}

void UpdateThread::run() {
  while (true) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !ready_.empty(); });
      work = std::move(ready_.extract(ready_.begin()).mapped());
    }
    work();
  }
}

}  // namespace roundpipe::runtime
