#pragma once

#include <functional>
#include <thread>

#include <roundpipe/core/mutex.h>

namespace roundpipe::runtime {

// A thread that looks after devices: whenever one has failed, and from time to time if any has a watchdog.
// Thread safety: any thread.
class Overseer {
 public:
  // Runs `look` after each wake(), and every `every_ms` (0: only then), on a thread of its own.
  Overseer(std::function<void()> look, double every_ms);
  ~Overseer() { stop(); }
  Overseer(const Overseer&) = delete;
  Overseer& operator=(const Overseer&) = delete;

  // Neither blocks nor throws.
  void wake() noexcept;
  // Ends the thread after a last look if one was asked for. A second call does nothing. Not from the thread itself.
  void stop();

 private:
  void run();

  const std::function<void()> look_;
  const double every_ms_;
  Mutex mutex_;
  Condition changed_;
  bool woken_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  bool stopping_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace roundpipe::runtime
