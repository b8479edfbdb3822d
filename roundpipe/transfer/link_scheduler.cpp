#include <roundpipe/transfer/link_scheduler.h>

#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <roundpipe/core/error.h>

namespace roundpipe::transfer {

using device::EventPtr;

struct LinkScheduler::Entry {
  // Fires `settled` when the last one drops it: this entry (which drops it after all else), or the copies it issued.
  std::shared_ptr<void> untouched;
  Transfer transfer;
  int64_t order = 0;
  bool begun = false;
  std::vector<Piece> pieces;
  size_t piece = 0;
  int64_t offset = 0;  // elements of pieces[piece] already issued
};

bool LinkScheduler::MoreUrgent::operator()(const std::shared_ptr<Entry>& a, const std::shared_ptr<Entry>& b) const {
  return std::pair(a->transfer.priority, a->order) < std::pair(b->transfer.priority, b->order);
}

LinkScheduler::LinkScheduler(device::Queue& queue) : queue_(queue), thread_([this] { run(); }) {}

LinkScheduler::~LinkScheduler() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void LinkScheduler::submit(Transfer transfer) {
  auto entry = std::make_shared<Entry>();
  entry->transfer = std::move(transfer);
  if (const EventPtr settled = entry->transfer.settled) {
    entry->untouched = {settled.get(), [settled](void*) { settled->fire(); }};
  }
  {
    std::lock_guard lock(mutex_);
    entry->order = next_order_++;
    ++waiting_;
  }
  device::when_all(entry->transfer.after, [this, entry] { ready(entry); });
}

void LinkScheduler::ready(const std::shared_ptr<Entry>& entry) {
  std::exception_ptr error;
  for (const EventPtr& event : entry->transfer.after) {
    if (event && !error) error = event->error();
  }
  if (error) entry->transfer.done->fail(error);
  std::lock_guard lock(mutex_);
  --waiting_;
  if (!error) ready_.insert(entry);
  // Notified under the lock: after it, a stopping destructor may be through.
  changed_.notify_all();
}

bool LinkScheduler::issue_chunk(Entry& entry) {
  while (entry.piece < entry.pieces.size()) {
    const Piece& piece = entry.pieces[entry.piece];
    const int64_t numel = piece.src.numel();
    const int64_t chunk = std::max<int64_t>(1, kChunk_bytes / std::max<int64_t>(1, piece.src.element_size()));
    const bool flat = piece.src.is_contiguous() && piece.dst.is_contiguous();
    const int64_t count = flat ? std::min(chunk, numel - entry.offset) : numel;
    if (count > 0) {
      if (count == numel) {
        queue_.copy(piece.dst, piece.src);
      } else {
        queue_.copy(piece.dst.view({-1}).narrow(0, entry.offset, count),
                    piece.src.view({-1}).narrow(0, entry.offset, count));
      }
      moved_bytes_.fetch_add(count * piece.src.element_size());
    }
    entry.offset += count;
    if (entry.offset >= numel) {
      ++entry.piece;
      entry.offset = 0;
    }
    if (count > 0) break;
  }
  return entry.piece >= entry.pieces.size();
}

void LinkScheduler::limit_in_flight() {
  while (!in_flight_.empty() && (in_flight_.size() >= kInFlight || in_flight_.front()->complete())) {
    in_flight_.front()->wait_complete();
    in_flight_.pop_front();
  }
}

void LinkScheduler::let_go(Entry& entry) {
  // A chunk of it may be on its way still.
  if (in_flight_.empty()) {
    entry.pieces.clear();
  } else {
    in_flight_.back()->then([pieces = std::move(entry.pieces)]() mutable { pieces.clear(); });
    entry.pieces.clear();
  }
}

void LinkScheduler::run() {
  const c10::InferenceMode plain(false);
  at::NoGradGuard no_grad;
  while (true) {
    // Before the choice, so that what becomes urgent meanwhile is chosen.
    limit_in_flight();
    std::shared_ptr<Entry> entry;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !ready_.empty() || (stopping_ && waiting_ == 0); });
      if (ready_.empty()) return;
      entry = *ready_.begin();
      ready_.erase(ready_.begin());
    }
    // Given up by whoever asked: whatever it pointed into may already be in use for something else.
    if (entry->transfer.done->complete()) {
      let_go(*entry);
      continue;
    }
    try {
      const auto scope = queue_.enter();
      if (!entry->begun) {
        entry->pieces = entry->transfer.begin();
        entry->begun = true;
        entry->transfer.begin = nullptr;  // the pieces hold what it held
      }
      const bool all_issued = issue_chunk(*entry);
      EventPtr arrived = device::make_event();
      if (!all_issued) {
        arrived->then([untouched = entry->untouched, done = entry->transfer.done, self = arrived.get()] {
          if (const std::exception_ptr error = self->error()) done->fail(error);
        });
      } else {
        // Both ends stay alive until the bytes are there, even when somebody else has failed `done` meanwhile, and no
        // longer: whoever hears of it may need their memory.
        arrived->then([untouched = entry->untouched, pieces = std::move(entry->pieces), done = entry->transfer.done,
                       self = arrived.get()]() mutable {
          pieces.clear();
          if (const std::exception_ptr error = self->error()) {
            done->fail(error);
          } else {
            done->fire();
          }
        });
      }
      in_flight_.push_back(arrived);
      queue_.signal(arrived);
      if (!all_issued) {
        std::lock_guard lock(mutex_);
        ready_.insert(entry);
      }
    } catch (...) {
      let_go(*entry);
      entry->transfer.begin = nullptr;
      entry->transfer.done->fail(std::current_exception());
    }
  }
}

}  // namespace roundpipe::transfer
