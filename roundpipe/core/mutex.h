#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

// Annotated locks, which Clang's thread safety analysis checks (-Wthread-safety, see
// https://clang.llvm.org/docs/ThreadSafetyAnalysis.html). For other compilers, the attributes are empty.
#if defined(__clang__)
#define ROUNDPIPE_ATTRIBUTE(...) __attribute__((__VA_ARGS__))
#else
#define ROUNDPIPE_ATTRIBUTE(...)
#endif

// On a member: read and written only with this lock held.
#define ROUNDPIPE_GUARDED_BY(...) ROUNDPIPE_ATTRIBUTE(guarded_by(__VA_ARGS__))
// On a function: called with this lock held.
#define ROUNDPIPE_REQUIRES(...) ROUNDPIPE_ATTRIBUTE(requires_capability(__VA_ARGS__))
// On a function that returns a reference to this lock.
#define ROUNDPIPE_RETURNS_LOCK(...) ROUNDPIPE_ATTRIBUTE(lock_returned(__VA_ARGS__))
// On a function that holds a number of locks known only at run time.
#define ROUNDPIPE_NOT_ANALYZED ROUNDPIPE_ATTRIBUTE(no_thread_safety_analysis)

namespace roundpipe {

// How many of the locks below this thread holds, turns left out.
int locks_held() noexcept;
// What is about to run is the user's, and may wait for a thread that needs one of our locks. With ROUNDPIPE_DEBUG_LOCKS
// set in the environment, aborts the process, after a message, if this thread holds one.
void require_no_locks(const char* what) noexcept;

namespace detail {
void count_locks(int more) noexcept;
}  // namespace detail

// A std::mutex that the analysis understands. Not recursive.
class ROUNDPIPE_ATTRIBUTE(capability("mutex")) Mutex {
 public:
  // Of a turn, which locks_held() does not count: values that may belong to an interpreter are dropped under it, and
  // whoever waits for it holds no interpreter lock.
  enum class Kind { kLock, kTurn };

  Mutex() = default;
  explicit Mutex(Kind kind) : weight_(kind == Kind::kLock ? 1 : 0) {}
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() ROUNDPIPE_ATTRIBUTE(acquire_capability()) {
    mutex_.lock();
    detail::count_locks(weight_);
  }
  void unlock() ROUNDPIPE_ATTRIBUTE(release_capability()) {
    detail::count_locks(-weight_);
    mutex_.unlock();
  }

 private:
  friend class Condition;
  std::mutex mutex_;
  const int weight_ = 1;
};

// Holds a mutex until the end of the scope.
class ROUNDPIPE_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ROUNDPIPE_ATTRIBUTE(acquire_capability(mutex)) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() ROUNDPIPE_ATTRIBUTE(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// A condition variable. Wait in a loop that tests the condition, so that the analysis sees what the condition reads.
class Condition {
 public:
  // Unlocks `mutex`, blocks until notified (or a spurious wake-up), and locks it again.
  void wait(Mutex& mutex) ROUNDPIPE_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    changed_.wait(lock);
    lock.release();
  }
  // The same, but blocks for at most `timeout_ms`.
  void wait_for(Mutex& mutex, double timeout_ms) ROUNDPIPE_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    changed_.wait_for(lock, std::chrono::duration<double, std::milli>(timeout_ms));
    lock.release();
  }
  void notify_all() noexcept { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

}  // namespace roundpipe
