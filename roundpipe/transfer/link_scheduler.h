#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/mutex.h>
#include <roundpipe/device/device.h>
#include <roundpipe/device/event.h>
#include <roundpipe/schedule/priority.h>

namespace roundpipe::transfer {

using schedule::kPriorities;
using schedule::name_of;
using schedule::Priority;

using device::LinkOptions;
using device::Piece;

struct Transfer {
  Priority priority = Priority::kActivation;
  // The transfer starts when all of these are complete. The first failed one fails the transfer. Null events count as
  // fired.
  std::vector<device::EventPtr> after;
  // Returns the pieces to copy. Runs on the link's thread, inside the queue's scope, when the transfer is picked. It
  // may allocate, so that device memory is taken just before bytes move. c10::OutOfMemoryError sets the transfer aside
  // until resume(), and then this runs again; any other exception fails `done`.
  std::function<std::vector<Piece>()> begin;
  // Fires when every byte has arrived. Never null.
  device::EventPtr done;
  // Fires when the link no longer touches this transfer's memory, however the transfer ended; even if a copy fails,
  // everything issued before it has arrived by then. If other code may fail `done`, it must wait for this event before
  // it reuses the memory. May be null.
  device::EventPtr settled;
};

// Totals of one class of transfers, over those that have arrived.
struct LinkUse {
  int64_t transfers = 0;
  int64_t bytes = 0;
  double queued_ms = 0;  // from the completion of `after` until the link began the transfer
  double moving_ms = 0;  // from then until the last byte had arrived
};

// Learns how long a link takes for its bytes, from the chunks of its transfers.
class LinkObserver {
 public:
  virtual ~LinkObserver() = default;
  // A chunk of `bytes` that was issued at `issued_ms` has arrived at `arrived_ms` (Clock milliseconds). Chunks of one
  // link come in the order of their arrival, one at a time, from any thread. Must not block.
  virtual void arrived(int64_t bytes, double issued_ms, double arrived_ms) noexcept = 0;
};

// Schedules all transfers in one direction of one device's link.
//
// One thread issues chunks of at most LinkOptions::chunk_bytes, those of the most urgent ready transfer first, and
// keeps at most kInFlight chunks in flight. An urgent transfer thus waits for chunks, never for a layer. Small pieces
// share a chunk. If the device has no memory for a transfer, the transfer stands aside until resume(), and others go
// on. Once begun, a transfer does not stand aside: if the device has no memory for the contiguous copy that a strided
// piece may need, the piece is cut into smaller ones.
// Thread safety: any thread. submit(), resume(), cancel_aside() and use() never block; wait() and stop() block.
// submit() does not throw: if it cannot take a transfer, it fails the transfer's `done`.
class LinkScheduler {
 public:
  static constexpr size_t kInFlight = 2;

  // `observer` is told of every chunk that has arrived; null: nobody is.
  explicit LinkScheduler(device::Queue& queue, LinkOptions options = {},
                         std::shared_ptr<LinkObserver> observer = nullptr);
  ~LinkScheduler() { stop(); }
  LinkScheduler(const LinkScheduler&) = delete;
  LinkScheduler& operator=(const LinkScheduler&) = delete;

  // Finishes all submitted transfers, fails those that stand aside at the end, and ends the link's thread. A second
  // call does nothing. REQUIRES: every `after` event completes, and nothing is submitted from now on; one thread at a
  // time.
  void stop();

  void submit(Transfer transfer) noexcept;

  // Blocks until `done`, of a transfer submitted here, is complete. Returns false early if the transfer stands aside
  // because the device has no memory.
  bool wait(const device::EventPtr& done) { return wait(done, done); }
  // The same for `part`, which completes with a piece of that transfer, or with all of it.
  bool wait(const device::EventPtr& done, const device::EventPtr& part);
  // Retries the transfers that stand aside. Call it when memory has become free.
  void resume();
  // Cancels the transfer of `done` if it stands aside: fails it with its out-of-memory error.
  void cancel_aside(const device::EventPtr& done);

  // Whether a chunk was issued more than `limit_ms` before `now_ms` (Clock milliseconds), and has not arrived.
  bool is_overdue(double now_ms, double limit_ms) const;
  // Bytes moved since construction.
  int64_t moved_bytes() const { return moved_bytes_.load(); }
  LinkUse use(Priority priority) const;

 private:
  struct Entry;
  struct Chunk;
  // The order of a heap whose first entry is the most urgent.
  struct LessUrgent {
    bool by_class = true;
    bool operator()(const std::shared_ptr<Entry>& a, const std::shared_ptr<Entry>& b) const;
  };
  // The transfers that had no memory. Shared, because callbacks of their events may outlive the scheduler.
  struct Aside {
    Mutex mutex;  // never held together with another lock
    Condition changed;
    std::vector<std::shared_ptr<Entry>> entries ROUNDPIPE_GUARDED_BY(mutex);
  };

  void run();
  // Waits for the next entry to issue; null when nothing is left and the link stops.
  std::shared_ptr<Entry> next();
  // REQUIRES: the entry counts in unfinished_, so that the heap has room for it.
  void push_ready(std::shared_ptr<Entry> entry) noexcept ROUNDPIPE_REQUIRES(mutex_);
  void forget_one();
  void issue(const std::shared_ptr<Entry>& entry);
  void stand_aside(const std::shared_ptr<Entry>& entry, std::exception_ptr error);
  void ready(const std::shared_ptr<Entry>& entry) noexcept;
  // Issues what `chunk` moves. Returns whether the entry has nothing left to issue.
  bool issue_chunk(Entry& entry, Chunk& chunk);
  // Issues the entry's whole piece and returns true. If the device has no memory to copy it as it is, cuts the piece in
  // two and returns false.
  bool copy_or_cut(Entry& entry);
  void limit_in_flight();

  device::Queue& queue_;
  const LinkOptions options_;
  const LessUrgent less_urgent_;
  const std::shared_ptr<LinkObserver> observer_;
  std::atomic<int64_t> moved_bytes_{0};
  const std::shared_ptr<Aside> aside_ = std::make_shared<Aside>();

  struct Uses {
    mutable Mutex mutex;
    std::array<LinkUse, kPriorities> of ROUNDPIPE_GUARDED_BY(mutex);
  };
  const std::shared_ptr<Uses> uses_ = std::make_shared<Uses>();

  mutable Mutex mutex_;
  Condition changed_;
  std::vector<std::shared_ptr<Entry>> ready_
      ROUNDPIPE_GUARDED_BY(mutex_);  // a heap by less_urgent_, with room for unfinished_
  int64_t next_order_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  int64_t waiting_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;    // submitted, not ready yet
  size_t unfinished_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;  // at least the number of entries that can become ready
  bool stopping_ ROUNDPIPE_GUARDED_BY(mutex_) = false;

  // Chunks whose issue has begun, oldest first. The link's thread changes it.
  struct InFlight {
    device::EventPtr arrived;
    double issued_ms = 0;
  };
  mutable Mutex flight_mutex_;
  std::deque<InFlight> in_flight_ ROUNDPIPE_GUARDED_BY(flight_mutex_);
  std::thread thread_;
};

}  // namespace roundpipe::transfer
