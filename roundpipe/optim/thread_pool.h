#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace roundpipe::optim {

// The threads that update parameters on the host. Idle threads sleep. Threads that the pool starts have a lower
// priority than the devices' threads.
//
// Thread safety: for_ranges from any thread; callers take turns, and the caller works too.
class ThreadPool {
 public:
  // `threads` includes the caller. `pinned`: each started thread stays on one core, from the last core that this
  // process may use downwards, so that the first cores are left to the workers. Throws std::invalid_argument for a
  // number of threads out of range.
  explicit ThreadPool(int threads, bool pinned = false);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls work(begin, end) for parts of [0, count), each but the last a multiple of `grain`. Returns when all are done,
  // or then rethrows the first error of `work`. `work` runs in the default floating-point environment, so that a caller
  // that flushes denormals gets the same results as the other threads.
  void for_ranges(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work);

  // The pool of this process; a child made by fork() has its own. Before the first set_current, it has
  // ROUNDPIPE_OPTIM_THREADS threads (default: default_threads()), pinned if ROUNDPIPE_OPTIM_PIN is 1.
  // Throws std::invalid_argument for a bad value of these variables.
  static std::shared_ptr<ThreadPool> current();
  static void set_current(int threads, bool pinned);
  // Sets how many threads feed devices in this process. If the pool has the default number of threads, the next
  // current() makes a new one; a pool that is working finishes first.
  static void leave_cores(int device_threads);

 private:
  struct Call;
  struct Team;
  // Whether this is the process that made the pool. In a child made by fork(), the caller works alone.
  bool here() const;
  const int threads_;
  const int process_;
  std::unique_ptr<Team> team_;
};

}  // namespace roundpipe::optim
