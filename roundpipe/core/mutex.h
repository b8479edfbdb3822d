#pragma once

#include <condition_variable>
#include <mutex>

// Locks that say what they protect, so that Clang's thread safety analysis (-Wthread-safety, see
// https://clang.llvm.org/docs/ThreadSafetyAnalysis.html) checks it. For other compilers the attributes are empty.
#if defined(__clang__)
#define ROUNDPIPE_ATTRIBUTE(...) __attribute__((__VA_ARGS__))
#else
#define ROUNDPIPE_ATTRIBUTE(...)
#endif

// Of a member: read and written with that lock held.
#define ROUNDPIPE_GUARDED_BY(...) ROUNDPIPE_ATTRIBUTE(guarded_by(__VA_ARGS__))
// Of a function: called with that lock held, or without it.
#define ROUNDPIPE_REQUIRES(...) ROUNDPIPE_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define ROUNDPIPE_EXCLUDES(...) ROUNDPIPE_ATTRIBUTE(locks_excluded(__VA_ARGS__))
// Of a function that returns a reference to that lock.
#define ROUNDPIPE_RETURNS_LOCK(...) ROUNDPIPE_ATTRIBUTE(lock_returned(__VA_ARGS__))
// Of a function that holds a number of locks known at run time only.
#define ROUNDPIPE_NOT_ANALYZED ROUNDPIPE_ATTRIBUTE(no_thread_safety_analysis)

namespace roundpipe {

// A std::mutex that the analysis knows. Not recursive.
class ROUNDPIPE_ATTRIBUTE(capability("mutex")) Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() ROUNDPIPE_ATTRIBUTE(acquire_capability()) { mutex_.lock(); }
  void unlock() ROUNDPIPE_ATTRIBUTE(release_capability()) { mutex_.unlock(); }

 private:
  friend class Condition;
  std::mutex mutex_;
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

// A condition variable. The condition is a loop around wait(), so that the analysis sees what it reads.
class Condition {
 public:
  // Unlocks `mutex`, blocks until notified or for no reason, and locks it again.
  void wait(Mutex& mutex) ROUNDPIPE_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    changed_.wait(lock);
    lock.release();
  }
  void notify_all() noexcept { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

}  // namespace roundpipe
