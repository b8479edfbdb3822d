#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <roundpipe/device/event.h>

namespace roundpipe::device {

// Puts what a stream's own clock says on the host's Clock. A point of the stream is never before the host asked for it,
// nor after the host saw it, nor before the point before it. Thread safety: one thread at a time.
class StreamClock {
 public:
  // When the stream passed a point: asked for at `recorded_ms`, seen at `noticed_ms`, and `since_last_ms` after the
  // point that was given last; none when the stream has no clock, or did not tell.
  double passed_ms(double recorded_ms, double noticed_ms, std::optional<double> since_last_ms);

 private:
  std::optional<double> last_ms_;
};

// Turns the progress of one stream into events, in order, without blocking the stream: a thread asks and sleeps. Stream
// events are used again, so that none is made once the pipeline runs. `timed`: the events' time_ms() is when the stream
// got there, by its own clock where the backend has one, so that neither late threads nor slow callbacks show in it.
class CompletionThread {
 public:
  CompletionThread(c10::Stream stream, bool timed);
  // Waits for what has been asked for.
  ~CompletionThread();

  // Fires `event` when what has been issued to the stream is done; fails it with what asking throws. Throws what
  // recording throws, and `event` is left as it is. One thread at a time, on the stream's device.
  void watch(EventPtr event);

 private:
  struct Pending {
    std::unique_ptr<c10::Event> recorded;
    double recorded_ms;
    EventPtr event;
  };
  std::unique_ptr<c10::Event> take();
  void run();
  double passed_ms(const Pending& now);

  const c10::Stream stream_;
  const c10::EventFlag flag_;

  // The thread's own.
  StreamClock clock_;
  std::unique_ptr<c10::Event> last_;  // that the stream has passed; only where it has a clock

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Pending> pending_;                     // protected by mutex_
  std::vector<std::unique_ptr<c10::Event>> spare_;  // protected by mutex_
  bool stopping_ = false;                           // protected by mutex_
  std::thread thread_;
};

}  // namespace roundpipe::device
