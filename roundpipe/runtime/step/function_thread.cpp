#include <roundpipe/runtime/step/function_thread.h>

#include <atomic>
#include <thread>
#include <utility>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>

namespace roundpipe::runtime {

namespace {

thread_local bool is_running = false;
std::atomic<bool> is_there{false};

}  // namespace

bool FunctionThread::Run::result() const {
  if (error_) std::rethrow_exception(error_);
  return returned_;
}

FunctionThread& FunctionThread::instance() {
  // Never destroyed: a process may end while the thread waits.
  static auto* instance = new FunctionThread;
  return *instance;
}

FunctionThread::FunctionThread() {
  std::thread([this] { run(); }).detach();
  is_there = true;
}

FunctionThread::RunPtr FunctionThread::queue(std::function<bool()> function) {
  require_own_process();
  const auto run = std::make_shared<Run>();
  run->function_ = std::move(function);
  {
    const MutexLock lock(mutex_);
    queued_.push_back(run);
    newest_ = run->over_;
  }
  changed_.notify_all();
  return run;
}

bool FunctionThread::is_here() { return is_running; }

void FunctionThread::require_elsewhere() {
  if (!is_here()) return;
  throw Error(
      "[step] the step function calls something that waits for step functions, such as synchronize() or "
      "state_dict(), and would wait for itself; call it after model.step");
}

void FunctionThread::wait_all() {
  if (is_here()) return;
  device::EventPtr newest;
  {
    const MutexLock lock(mutex_);
    newest = newest_;
  }
  if (newest) device::wait_interruptible(*newest);
}

void FunctionThread::drain_any() {
  if (!is_there.load()) return;
  FunctionThread& own = instance();
  const MutexLock lock(own.mutex_);
  while (!own.queued_.empty() || own.working_) own.changed_.wait(own.mutex_);
}

void FunctionThread::run() {
  const std::shared_ptr<void> attached = frontend().attach_thread();
  while (true) {
    RunPtr next;
    {
      const MutexLock lock(mutex_);
      while (queued_.empty()) changed_.wait(mutex_);
      next = std::move(queued_.front());
      queued_.pop_front();
      working_ = true;
    }
    is_running = true;
    require_no_locks("a step function");
    try {
      next->returned_ = next->function_();
    } catch (...) {
      next->error_ = std::current_exception();
      frontend().clear_error();
    }
    next->function_ = nullptr;  // may hold the last reference to a model
    is_running = false;
    next->over_->fire();
    next.reset();
    const MutexLock lock(mutex_);
    working_ = false;
    if (queued_.empty()) changed_.notify_all();
  }
}

}  // namespace roundpipe::runtime
