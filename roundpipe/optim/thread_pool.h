#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace roundpipe::optim {

// The threads that update parameters on the host. They sleep when there is nothing to do, and those that the pool
// starts have a lower priority than the devices'.
//
// Thread safety: for_ranges from any thread; callers take turns. The caller works, too.
class ThreadPool {
 public:
  // `threads` counts the caller. `pinned`: each started thread stays on a core of its own, from the last core that
  // this process may use downwards, so that the first cores are left to the device workers.
  explicit ThreadPool(int threads, bool pinned = false);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls work(begin, end) for parts of [0, count), each but the last a multiple of `grain`; returns when all are
  // done. Rethrows the first error of `work` after that. `work` runs in the default floating-point environment, so
  // that a caller which flushes denormals gets what the other threads get.
  void for_ranges(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work);

  // The one of this process; a child made by fork() has one of its own. Before the first set_current:
  // ROUNDPIPE_OPTIM_THREADS threads (else default_threads()), pinned when ROUNDPIPE_OPTIM_PIN is 1.
  static std::shared_ptr<ThreadPool> current();
  static void set_current(int threads, bool pinned);
  // How many threads feed devices in this process now. A pool that has the default number of threads is made anew, at
  // the next current(); one that is at work finishes first.
  static void leave_cores(int device_threads);

 private:
  struct Call;
  struct Team;
  // False in a child made by fork(), where the caller works alone.
  bool here() const;
  const int threads_;
  const int process_;
  std::unique_ptr<Team> team_;
};

}  // namespace roundpipe::optim
