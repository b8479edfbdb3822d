#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/device/device.h>
#include <roundpipe/device/event.h>

namespace roundpipe::transfer {

// Urgency of a transfer; lower goes first, submission order decides within a class.
enum class Priority { kActivation, kBoundaryGradient, kWeight, kParameterGradient };
inline constexpr size_t kPriorities = 4;
const char* name_of(Priority priority);

using device::LinkOptions;
using device::Piece;

struct Transfer {
  Priority priority = Priority::kActivation;
  // Not begun until all are complete; the first failed one fails this transfer. Null events count as fired.
  std::vector<device::EventPtr> after;
  // Runs on the link's thread inside the queue's scope when the transfer is picked, and may allocate: so device
  // memory is taken when bytes are about to move, not when the transfer is asked for. c10::OutOfMemoryError puts the
  // transfer aside until resume(); anything else that it throws fails `done`. May run again after running out.
  std::function<std::vector<Piece>()> begin;
  // Fires when every byte has arrived. Never null.
  device::EventPtr done;
  // Fires when the link touches nothing of this transfer any more, however it ended: also when a copy fails, what was
  // issued before has then arrived. Whoever may fail `done` from outside waits for this one before it uses the memory
  // for something else. May be null.
  device::EventPtr settled;
};

// What one class of transfers has taken so far, over transfers that arrived.
struct LinkUse {
  int64_t transfers = 0;
  int64_t bytes = 0;
  double queued_ms = 0;  // from when all it waits for was there until its first byte moved
  double moving_ms = 0;  // from then until the last byte had arrived
};

// Everything that moves in one direction of one device's link.
//
// One thread issues chunks of at most LinkOptions::chunk_bytes, the most urgent ready transfer first, and keeps at most
// kInFlight chunks unfinished, so an urgent transfer waits for chunks, never for a layer. Small pieces share a chunk.
// A transfer for which the device has no memory stands aside, and others go on, until resume(). One that has begun goes
// through: a piece that is not contiguous, of which the device may need a contiguous copy, is cut into smaller ones.
// Thread safety: submit(), resume(), give_up() and use() from any thread, never block; wait() blocks. submit() does not
// throw: what keeps a transfer from being taken fails its `done`.
class LinkScheduler {
 public:
  static constexpr size_t kInFlight = 2;

  explicit LinkScheduler(device::Queue& queue, LinkOptions options = {});
  ~LinkScheduler() { stop(); }
  LinkScheduler(const LinkScheduler&) = delete;
  LinkScheduler& operator=(const LinkScheduler&) = delete;

  // Finishes everything that was submitted, and ends the link's thread. REQUIRES that every `after` event completes,
  // and that nothing is submitted from now on. Again: does nothing.
  void stop();

  void submit(Transfer transfer) noexcept;

  // Blocks until `done`, of a transfer submitted here, is complete, or until that transfer stands aside for want of
  // memory: then false.
  bool wait(const device::EventPtr& done);
  // Memory has become free: those that stand aside are tried again.
  void resume();
  // Fails those that stand aside and wait for `done`, with the error that they had.
  void give_up(const device::EventPtr& done);

  // Bytes moved since construction.
  int64_t moved_bytes() const { return moved_bytes_.load(); }
  LinkUse use(Priority priority) const;

 private:
  struct Entry;
  struct Chunk;
  // The order of a heap, whose first is the most urgent.
  struct LessUrgent {
    bool by_class = true;
    bool operator()(const std::shared_ptr<Entry>& a, const std::shared_ptr<Entry>& b) const;
  };
  // Those for which there was no memory. Callbacks of their events may outlive the scheduler, so this does, too.
  struct Aside {
    std::mutex mutex;  // taken alone
    std::condition_variable changed;
    std::vector<std::shared_ptr<Entry>> entries;  // protected by mutex
  };

  void run();
  // What is to be issued next; null when there is nothing left and the link is to stop.
  std::shared_ptr<Entry> next();
  // REQUIRES: mutex_ is held, and the entry is counted in unfinished_, so that there is room for it.
  void push_ready(std::shared_ptr<Entry> entry) noexcept;
  void forget_one();
  void issue(const std::shared_ptr<Entry>& entry);
  void stand_aside(const std::shared_ptr<Entry>& entry, std::exception_ptr error);
  void ready(const std::shared_ptr<Entry>& entry) noexcept;
  // Issues the next chunk; true when the entry has nothing left to issue.
  bool issue_chunk(Entry& entry);
  // Issues all of the entry's piece; cuts it instead where the device has no memory to copy it as it is.
  bool copy_or_cut(Entry& entry);
  void limit_in_flight();

  device::Queue& queue_;
  const LinkOptions options_;
  const LessUrgent less_urgent_;
  std::atomic<int64_t> moved_bytes_{0};
  const std::shared_ptr<Aside> aside_ = std::make_shared<Aside>();

  struct Uses {
    mutable std::mutex mutex;
    std::array<LinkUse, kPriorities> of;  // protected by mutex
  };
  const std::shared_ptr<Uses> uses_ = std::make_shared<Uses>();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Protected by mutex_.
  std::vector<std::shared_ptr<Entry>> ready_;  // a heap by less_urgent_, with room for unfinished_
  int64_t next_order_ = 0;
  int64_t waiting_ = 0;    // submitted, not ready yet
  size_t unfinished_ = 0;  // at least as many as can become ready
  bool stopping_ = false;

  std::deque<device::EventPtr> in_flight_;  // touched by the link's thread only
  std::thread thread_;
};

}  // namespace roundpipe::transfer
