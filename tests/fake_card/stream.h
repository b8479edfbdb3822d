#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include <c10/core/Device.h>

namespace fake_card {

// A point in a stream's order: done when the stream has passed it.
// Thread safety: any thread.
class Mark {
 public:
  void reach();
  bool done() const;
  void wait() const;
  // When it was reached, of a steady clock. REQUIRES: done().
  double time_ms() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;   // protected by mutex_
  double time_ms_ = 0;  // protected by mutex_
};

using MarkPtr = std::shared_ptr<Mark>;

// Work of one card in order, on a thread of its own. Lives until the process ends.
// Thread safety: any thread. After a fault of the card, what is queued does nothing any more.
class Stream {
 public:
  Stream(c10::DeviceIndex card, int64_t id);

  c10::DeviceIndex card() const { return card_; }
  int64_t id() const { return id_; }

  // Queues `work`, which `what` names if it fails: the card has a fault then. Throws when the card has one already.
  void add(std::string what, std::function<void()> work);
  // Queues what a faulty card does as well: bookkeeping of its memory.
  void add_bookkeeping(std::function<void()> work);

  MarkPtr mark();
  // What is queued from now on runs after `mark`.
  void wait_for(MarkPtr mark);
  // Blocks until all is done that was queued before. Throws when the card has a fault.
  void synchronize();
  bool idle() const;

  // Nothing that is queued from now on begins before release().
  void hold();
  void release();

  // Every task takes so much longer, delays besides.
  void slow_down(double ms_per_task) { slow_ms_.store(ms_per_task); }

 private:
  struct Task {
    std::string what;
    std::function<void()> work;
    bool also_when_faulty = false;
  };
  void queue(Task task);
  void run();
  void delay();

  const c10::DeviceIndex card_;
  const int64_t id_;
  std::atomic<double> slow_ms_{0};

  // Of the stream's own thread.
  uint64_t delays_made_for_ = 0;
  double mean_delay_us_ = 0;
  std::mt19937_64 random_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Protected by mutex_.
  std::deque<Task> tasks_;
  bool busy_ = false;
  MarkPtr gate_;

  std::thread thread_;
};

// The machine's cards, as the environment says: CARD_COUNT (2), CARD_MEMORY_MIB of each (4096), CARD_DELAYS (0).
c10::DeviceIndex card_count();
size_t card_memory_bytes();

// Streams of a card: 0 is the default one; those of the pool and new ones come after it.
Stream& stream_of(c10::DeviceIndex card, int64_t id);
int64_t pooled_stream(c10::DeviceIndex card, bool high_priority);
int64_t new_stream(c10::DeviceIndex card);
// Blocks until all streams of the card are idle. Throws when the card has a fault.
void synchronize_card(c10::DeviceIndex card);
// Whether anything has run there, or any memory was taken.
bool has_context(c10::DeviceIndex card);
void make_context(c10::DeviceIndex card);

// From now on tasks begin late, by times that follow from `seed`, the stream and the task's number; 0 = at once.
void set_delays(uint64_t seed);

// A fault stays until the process ends, or a test gives the card back.
void set_fault(c10::DeviceIndex card, const std::string& why);
void clear_fault(c10::DeviceIndex card);
bool has_fault(c10::DeviceIndex card);
// Throws c10::AcceleratorError when the card has a fault.
void check_fault(c10::DeviceIndex card);

}  // namespace fake_card
