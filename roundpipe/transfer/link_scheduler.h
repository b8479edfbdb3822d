#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/device/device.h>
#include <roundpipe/device/event.h>

namespace roundpipe::transfer {

// Urgency of a transfer; lower goes first, submission order decides within a class.
enum class Priority { kActivation, kBoundaryGradient, kWeight, kParameterGradient };

using device::Piece;

struct Transfer {
  Priority priority = Priority::kActivation;
  // Not begun until all are complete; the first failed one fails this transfer. Null events count as fired.
  std::vector<device::EventPtr> after;
  // Runs on the link's thread inside the queue's scope when the transfer is picked, and may allocate: so device
  // memory is taken when bytes are about to move, not when the transfer is asked for. What it throws fails `done`.
  std::function<std::vector<Piece>()> begin;
  // Fires when every byte has arrived. Never null.
  device::EventPtr done;
  // Fires when the link touches nothing of this transfer any more, however it ended. Whoever may fail `done` from
  // outside waits for this one before it uses the memory for something else. May be null.
  device::EventPtr settled;
};

// Everything that moves in one direction of one device's link.
//
// One thread issues chunks of at most kChunk_bytes, the most urgent ready transfer first, and keeps at most
// kInFlight chunks unfinished, so an urgent transfer waits for chunks, never for a layer.
// Thread safety: submit() from any thread, never blocks. The destructor finishes everything that was
// submitted: REQUIRES that every `after` event completes.
class LinkScheduler {
 public:
  static constexpr int64_t kChunk_bytes = 64 * 1000 * 1000;
  static constexpr size_t kInFlight = 2;

  explicit LinkScheduler(device::Queue& queue);
  ~LinkScheduler();
  LinkScheduler(const LinkScheduler&) = delete;
  LinkScheduler& operator=(const LinkScheduler&) = delete;

  void submit(Transfer transfer);

  // Bytes moved since construction.
  int64_t moved_bytes() const { return moved_bytes_.load(); }

 private:
  struct Entry;
  struct MoreUrgent {
    bool operator()(const std::shared_ptr<Entry>& a, const std::shared_ptr<Entry>& b) const;
  };

  void run();
  void ready(const std::shared_ptr<Entry>& entry);
  // Issues the next chunk; true when the entry has nothing left to issue.
  bool issue_chunk(Entry& entry);
  void limit_in_flight();
  // Drops the tensors of a transfer that is given up, once nothing in flight can touch them.
  void let_go(Entry& entry);

  device::Queue& queue_;
  std::atomic<int64_t> moved_bytes_{0};

  std::mutex mutex_;
  std::condition_variable changed_;
  // Protected by mutex_.
  std::set<std::shared_ptr<Entry>, MoreUrgent> ready_;
  int64_t next_order_ = 0;
  int64_t waiting_ = 0;  // submitted, not ready yet
  bool stopping_ = false;

  std::deque<device::EventPtr> in_flight_;  // touched by the link's thread only
  std::thread thread_;
};

}  // namespace roundpipe::transfer
