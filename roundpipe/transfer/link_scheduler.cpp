#include <roundpipe/transfer/link_scheduler.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/error.h>

namespace roundpipe::transfer {

using device::EventPtr;

const char* name_of(Priority priority) {
  switch (priority) {
    case Priority::kActivation:
      return "activations";
    case Priority::kBoundaryGradient:
      return "boundary gradients";
    case Priority::kWeight:
      return "weights";
    case Priority::kParameterGradient:
      return "parameter gradients";
  }
  return "?";
}

struct LinkScheduler::Entry {
  // Fires `settled` when the last one drops it: this entry (which drops it after all else), or the copies it issued.
  std::shared_ptr<void> untouched;
  Transfer transfer;
  int64_t order = 0;
  bool begun = false;
  std::exception_ptr no_memory;  // why it stands aside
  double ready_ms = 0;
  double begun_ms = 0;
  int64_t bytes = 0;
  std::vector<Piece> pieces;
  size_t piece = 0;
  int64_t offset = 0;  // elements of pieces[piece] already issued
};

bool LinkScheduler::MoreUrgent::operator()(const std::shared_ptr<Entry>& a, const std::shared_ptr<Entry>& b) const {
  const Priority none{};
  return std::pair(by_class ? a->transfer.priority : none, a->order) <
         std::pair(by_class ? b->transfer.priority : none, b->order);
}

LinkScheduler::LinkScheduler(device::Queue& queue, LinkOptions options)
    : queue_(queue), options_(options), ready_(MoreUrgent{!options.first_come}), thread_([this] { run(); }) {}

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
  entry->ready_ms = now_ms();
  std::lock_guard lock(mutex_);
  --waiting_;
  if (!error) ready_.insert(entry);
  // Notified under the lock: after it, a stopping destructor may be through.
  changed_.notify_all();
}

bool LinkScheduler::wait(const EventPtr& done) {
  done->then([aside = aside_] {
    const std::lock_guard lock(aside->mutex);
    aside->changed.notify_all();
  });
  const auto is_it = [&](const std::shared_ptr<Entry>& entry) { return entry->transfer.done == done; };
  std::unique_lock lock(aside_->mutex);
  aside_->changed.wait(lock, [&] { return done->complete() || std::ranges::any_of(aside_->entries, is_it); });
  return done->complete();
}

void LinkScheduler::stand_aside(const std::shared_ptr<Entry>& entry, std::exception_ptr error) {
  entry->no_memory = std::move(error);
  {
    const std::lock_guard lock(aside_->mutex);
    aside_->entries.push_back(entry);
    aside_->changed.notify_all();
  }
  // When it is given up by whoever asked for it, perhaps already, nobody comes to resume it.
  entry->transfer.done->then([aside = aside_, given_up = std::weak_ptr(entry)] {
    const std::shared_ptr<Entry> left = given_up.lock();
    const std::lock_guard lock(aside->mutex);
    std::erase(aside->entries, left);
  });
}

void LinkScheduler::resume() {
  std::vector<std::shared_ptr<Entry>> resumed;
  {
    const std::lock_guard lock(aside_->mutex);
    resumed.swap(aside_->entries);
  }
  if (resumed.empty()) return;
  const std::lock_guard lock(mutex_);
  ready_.insert(resumed.begin(), resumed.end());
  changed_.notify_all();
}

void LinkScheduler::give_up(const EventPtr& done) {
  std::exception_ptr error;
  {
    const std::lock_guard lock(aside_->mutex);
    for (const std::shared_ptr<Entry>& entry : aside_->entries) {
      if (entry->transfer.done == done) error = entry->no_memory;
    }
  }
  if (error) done->fail(error);
}

LinkUse LinkScheduler::use(Priority priority) const {
  const std::lock_guard lock(uses_->mutex);
  return uses_->of[static_cast<size_t>(priority)];
}

bool LinkScheduler::issue_chunk(Entry& entry) {
  int64_t room_bytes = options_.chunk_bytes > 0 ? options_.chunk_bytes : std::numeric_limits<int64_t>::max();
  bool first = true;
  while (entry.piece < entry.pieces.size()) {
    const Piece& piece = entry.pieces[entry.piece];
    const int64_t numel = piece.src.numel();
    const auto element_bytes = std::max<int64_t>(1, piece.src.element_size());
    const bool flat = piece.src.is_contiguous() && piece.dst.is_contiguous();
    const int64_t most = std::max<int64_t>(first ? 1 : 0, room_bytes / element_bytes);
    const int64_t left = numel - entry.offset;
    // One that cannot be cut goes whole, at the beginning of a chunk.
    if (!first && (flat ? most == 0 : left > most)) break;
    const int64_t count = flat ? std::min(most, left) : left;
    if (count > 0) {
      if (count == numel) {
        queue_.copy(piece.dst, piece.src);
      } else {
        queue_.copy(piece.dst.view({-1}).narrow(0, entry.offset, count),
                    piece.src.view({-1}).narrow(0, entry.offset, count));
      }
      moved_bytes_.fetch_add(count * element_bytes);
      entry.bytes += count * element_bytes;
      room_bytes -= count * element_bytes;
      first = false;
    }
    entry.offset += count;
    if (entry.offset < numel) break;
    ++entry.piece;
    entry.offset = 0;
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
      if (ready_.empty()) break;
      entry = *ready_.begin();
      ready_.erase(ready_.begin());
    }
    // Given up by whoever asked: whatever it pointed into may already be in use for something else.
    if (entry->transfer.done->complete()) {
      let_go(*entry);
      continue;
    }
    try {
      issue(entry);
    } catch (const c10::OutOfMemoryError&) {
      if (entry->begun) {
        let_go(*entry);
        entry->transfer.done->fail(std::current_exception());
      } else {
        stand_aside(entry, std::current_exception());
      }
    } catch (...) {
      let_go(*entry);
      entry->transfer.begin = nullptr;
      entry->transfer.done->fail(std::current_exception());
    }
  }
  // Nobody is left who could make room.
  std::vector<std::shared_ptr<Entry>> left;
  {
    const std::lock_guard lock(aside_->mutex);
    left = aside_->entries;
  }
  for (const auto& entry : left) entry->transfer.done->fail(entry->no_memory);
}

void LinkScheduler::issue(const std::shared_ptr<Entry>& entry) {
  const auto scope = queue_.enter();
  if (!entry->begun) {
    entry->pieces = entry->transfer.begin();
    entry->begun = true;
    entry->transfer.begin = nullptr;  // the pieces hold what it held
    entry->begun_ms = now_ms();
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
                   uses = uses_, priority = entry->transfer.priority, bytes = entry->bytes, ready_ms = entry->ready_ms,
                   begun_ms = entry->begun_ms, self = arrived.get()]() mutable {
      pieces.clear();
      if (const std::exception_ptr error = self->error()) {
        done->fail(error);
        return;
      }
      {
        const std::lock_guard lock(uses->mutex);
        LinkUse& use = uses->of[static_cast<size_t>(priority)];
        ++use.transfers;
        use.bytes += bytes;
        use.queued_ms += begun_ms - ready_ms;
        use.moving_ms += self->time_ms() - begun_ms;
      }
      done->fire();
    });
  }
  in_flight_.push_back(arrived);
  queue_.signal(arrived);
  if (!all_issued) {
    std::lock_guard lock(mutex_);
    ready_.insert(entry);
  }
}

}  // namespace roundpipe::transfer
