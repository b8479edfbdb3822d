#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <roundpipe/core/mutex.h>
#include <roundpipe/device/event.h>

namespace roundpipe::device {

// Converts times of a stream's own clock to the host's Clock. The stream passes a point not before the host requested
// it, not after the host noticed it, and not before the previous point. Thread safety: one thread at a time.
class StreamClock {
 public:
  // Returns when the stream passed a point. The host requested the point at `recorded_ms` and noticed it at
  // `noticed_ms`; by the stream's clock, it was `since_last_ms` after the previous point (none if unknown).
  double passed_ms(double recorded_ms, double noticed_ms, std::optional<double> since_last_ms);

 private:
  std::optional<double> last_ms_;
};

// Turns the progress of one stream into events, in order, without blocking the stream: a thread polls and sleeps.
// Stream events are reused, so that a running pipeline makes no new ones. `timed`: an event's time_ms() is when the
// stream reached the point, by its own clock if the backend has one, so that late threads and slow callbacks do not
// count.
class CompletionThread {
 public:
  CompletionThread(c10::Stream stream, bool timed);
  // Waits until every watched event is complete.
  ~CompletionThread();

  // Fires `event` when the work issued to the stream so far is done; fails it with the error if polling throws. If
  // recording throws, passes the error on and leaves `event` as it is. One thread at a time, on the stream's device.
  void watch(EventPtr event);

 private:
  struct Pending {
    std::unique_ptr<c10::Event> recorded;
    double recorded_ms = 0;
    EventPtr event;
  };
  std::unique_ptr<c10::Event> take();
  void run();
  double passed_ms(const Pending& now);

  const c10::Stream stream_;
  const c10::EventFlag flag_;

  // Used by the thread only.
  StreamClock clock_;
  std::unique_ptr<c10::Event> last_;  // the last one that the stream passed; only if it has a clock

  Mutex mutex_;
  Condition changed_;
  std::deque<Pending> pending_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<c10::Event>> spare_ ROUNDPIPE_GUARDED_BY(mutex_);
  bool stopping_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace roundpipe::device
