#include <roundpipe/runtime/overseer.h>

#include <memory>
#include <utility>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/frontend.h>

namespace roundpipe::runtime {

Overseer::Overseer(std::function<void()> look, double every_ms)
    : look_(std::move(look)), every_ms_(every_ms), thread_([this] { run(); }) {}

void Overseer::wake() noexcept {
  const MutexLock lock(mutex_);
  woken_ = true;
  changed_.notify_all();
}

void Overseer::stop() {
  if (!thread_.joinable()) return;
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void Overseer::run() {
  become_engine_thread();
  // Jobs that are dropped here may hold objects of the interpreter.
  const std::shared_ptr<void> attached = frontend().attach_thread();
  while (true) {
    {
      const MutexLock lock(mutex_);
      if (every_ms_ > 0) {
        if (!woken_ && !stopping_) changed_.wait_for(mutex_, every_ms_);
      } else {
        while (!woken_ && !stopping_) changed_.wait(mutex_);
      }
      if (stopping_ && !woken_) return;
      woken_ = false;
    }
    look_();
  }
}

}  // namespace roundpipe::runtime
