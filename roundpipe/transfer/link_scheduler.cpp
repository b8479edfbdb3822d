#include <roundpipe/transfer/link_scheduler.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>

namespace roundpipe::transfer {

using device::EventPtr;

struct LinkScheduler::Entry {
  // Its deleter fires `settled`. Declared first, so destroyed last. Chunks in flight hold the entry.
  std::shared_ptr<void> untouched;
  Transfer transfer;
  int64_t order = 0;
  bool begun = false;
  std::exception_ptr no_memory;  // the reason why it stands aside
  double ready_ms = 0;
  double begun_ms = 0;
  int64_t bytes = 0;
  std::vector<Piece> pieces;
  size_t piece = 0;
  int64_t offset = 0;  // elements of pieces[piece] already issued
  // Limit on the elements of a strided piece; lowered when the device has no memory for more.
  int64_t most_strided = std::numeric_limits<int64_t>::max();
};

// The part of a transfer that is issued at once. Set before its event is signalled, read when it has arrived.
struct LinkScheduler::Chunk {
  // Keeps both ends of the copies alive until the bytes have arrived, even if `done` was failed from outside.
  std::shared_ptr<Entry> entry;
  int64_t bytes = 0;
  double issued_ms = 0;
  bool last = false;
  std::vector<EventPtr> pieces;  // Piece::arrived of those that end in it
  std::exception_ptr error;      // the reason why the rest was not issued; then nothing more is issued

  void arrived(const device::Event& event, Uses& uses, LinkObserver* observer) {
    const EventPtr done = entry->transfer.done;
    // Drop the pieces before `done` completes, because whoever waits for it may need their memory.
    if (last || error) entry->pieces.clear();
    if (!error) error = event.error();
    if (error) return done->fail(error);
    if (observer != nullptr && bytes > 0) observer->arrived(bytes, issued_ms, event.time_ms());
    if (done->error()) return;  // an earlier chunk was lost
    for (const EventPtr& piece : pieces) piece->fire_at(event.time_ms());
    if (!last) return;
    {
      const MutexLock lock(uses.mutex);
      LinkUse& use = uses.of[static_cast<size_t>(entry->transfer.priority)];
      ++use.transfers;
      use.bytes += entry->bytes;
      use.queued_ms += entry->begun_ms - entry->ready_ms;
      use.moving_ms += event.time_ms() - entry->begun_ms;
    }
    done->fire();
  }
};

bool LinkScheduler::LessUrgent::operator()(const std::shared_ptr<Entry>& a, const std::shared_ptr<Entry>& b) const {
  const Priority none{};
  return std::pair(by_class ? a->transfer.priority : none, a->order) >
         std::pair(by_class ? b->transfer.priority : none, b->order);
}

LinkScheduler::LinkScheduler(device::Queue& queue, LinkOptions options, std::shared_ptr<LinkObserver> observer)
    : queue_(queue),
      options_(options),
      less_urgent_{!options.first_come},
      observer_(std::move(observer)),
      thread_([this] { run(); }) {}

void LinkScheduler::stop() {
  if (!thread_.joinable()) return;
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void LinkScheduler::submit(Transfer transfer) noexcept {
  const EventPtr done = transfer.done;
  const EventPtr settled = transfer.settled;
  bool counted = false;
  try {
    auto entry = std::make_shared<Entry>();
    if (settled) entry->untouched = {settled.get(), [settled](void*) { settled->fire(); }};
    entry->transfer = std::move(transfer);
    {
      const MutexLock lock(mutex_);
      // Reserve here, so that push_ready allocates nothing, whatever thread it runs on.
      if (ready_.capacity() <= unfinished_) ready_.reserve(2 * unfinished_ + 8);
      entry->order = next_order_++;
      ++waiting_;
      ++unfinished_;
      counted = true;
    }
    device::when_all(entry->transfer.after, [this, entry] { ready(entry); });
  } catch (...) {
    done->fail(std::current_exception());
    if (settled) settled->fire();
    if (!counted) return;
    const MutexLock lock(mutex_);
    --waiting_;
    --unfinished_;
    changed_.notify_all();
  }
}

void LinkScheduler::push_ready(std::shared_ptr<Entry> entry) noexcept {
  ready_.push_back(std::move(entry));
  std::push_heap(ready_.begin(), ready_.end(), less_urgent_);
  changed_.notify_all();
}

void LinkScheduler::forget_one() {
  const MutexLock lock(mutex_);
  --unfinished_;
}

void LinkScheduler::ready(const std::shared_ptr<Entry>& entry) noexcept {
  std::exception_ptr error;
  for (const EventPtr& event : entry->transfer.after) {
    if (event && !error) error = event->error();
  }
  if (error) entry->transfer.done->fail(error);
  entry->ready_ms = now_ms();
  const MutexLock lock(mutex_);
  --waiting_;
  if (error) {
    --unfinished_;
  } else {
    push_ready(entry);
  }
  // Notify under the lock: after it, a stopping destructor may already have finished.
  changed_.notify_all();
}

bool LinkScheduler::wait(const EventPtr& done, const EventPtr& part) {
  part->then([aside = aside_] {
    const MutexLock lock(aside->mutex);
    aside->changed.notify_all();
  });
  const auto is_it = [&](const std::shared_ptr<Entry>& entry) { return entry->transfer.done == done; };
  const MutexLock lock(aside_->mutex);
  while (!part->complete() && std::ranges::none_of(aside_->entries, is_it)) aside_->changed.wait(aside_->mutex);
  return part->complete();
}

void LinkScheduler::stand_aside(const std::shared_ptr<Entry>& entry, std::exception_ptr error) {
  entry->no_memory = std::move(error);
  {
    const MutexLock lock(aside_->mutex);
    aside_->entries.push_back(entry);
    aside_->changed.notify_all();
  }
  // If the requester cancels the transfer (perhaps it has already), nobody resumes it: remove it then.
  entry->transfer.done->then([aside = aside_, cancelled = std::weak_ptr(entry)] {
    const std::shared_ptr<Entry> left = cancelled.lock();
    const MutexLock lock(aside->mutex);
    std::erase(aside->entries, left);
  });
}

void LinkScheduler::resume() {
  std::vector<std::shared_ptr<Entry>> resumed;
  {
    const MutexLock lock(aside_->mutex);
    resumed.swap(aside_->entries);
  }
  if (resumed.empty()) return;
  const MutexLock lock(mutex_);
  for (std::shared_ptr<Entry>& entry : resumed) push_ready(std::move(entry));
}

void LinkScheduler::cancel_aside(const EventPtr& done) {
  std::exception_ptr error;
  {
    const MutexLock lock(aside_->mutex);
    for (const std::shared_ptr<Entry>& entry : aside_->entries) {
      if (entry->transfer.done == done) error = entry->no_memory;
    }
  }
  if (error) done->fail(error);
}

bool LinkScheduler::is_overdue(double now_ms, double limit_ms) const {
  const MutexLock lock(flight_mutex_);
  return std::ranges::any_of(in_flight_, [&](const InFlight& chunk) {
    return now_ms - chunk.issued_ms > limit_ms && !chunk.arrived->complete();
  });
}

LinkUse LinkScheduler::use(Priority priority) const {
  const MutexLock lock(uses_->mutex);
  return uses_->of[static_cast<size_t>(priority)];
}

namespace {

// Cuts a piece in two along the dimension with the largest stride, so that repeated halves end up contiguous.
std::pair<Piece, Piece> halves(const Piece& piece) {
  int64_t widest = -1;
  for (int64_t dim = 0; dim < piece.src.dim(); ++dim) {
    const auto apart = [&](int64_t of) { return std::max(piece.src.stride(of), piece.dst.stride(of)); };
    if (piece.src.size(dim) > 1 && (widest < 0 || apart(dim) > apart(widest))) widest = dim;
  }
  const int64_t size = piece.src.size(widest);
  const auto part = [&](int64_t from, int64_t count) {
    return Piece{piece.dst.narrow(widest, from, count), piece.src.narrow(widest, from, count)};
  };
  std::pair<Piece, Piece> both{part(0, size / 2), part(size / 2, size - size / 2)};
  both.second.arrived = piece.arrived;
  return both;
}

bool is_flat(const Piece& piece) { return piece.src.is_contiguous() && piece.dst.is_contiguous(); }

}  // namespace

bool LinkScheduler::copy_or_cut(Entry& entry) {
  const Piece piece = entry.pieces[entry.piece];
  const int64_t numel = piece.src.numel();
  if (is_flat(piece) || numel <= entry.most_strided) {
    try {
      queue_.copy(piece.dst, piece.src);
      return true;
    } catch (const c10::OutOfMemoryError&) {
      if (is_flat(piece)) throw;  // cutting would not help: a contiguous copy needs no extra memory
      entry.most_strided = numel / 2;
    }
  }
  auto [first, second] = halves(piece);
  entry.pieces[entry.piece] = std::move(second);
  entry.pieces.insert(entry.pieces.begin() + static_cast<std::ptrdiff_t>(entry.piece), std::move(first));
  return false;
}

bool LinkScheduler::issue_chunk(Entry& entry, Chunk& chunk) {
  int64_t room_bytes = options_.chunk_bytes > 0 ? options_.chunk_bytes : std::numeric_limits<int64_t>::max();
  bool first = true;
  while (entry.piece < entry.pieces.size()) {
    const Piece& piece = entry.pieces[entry.piece];
    const int64_t numel = piece.src.numel();
    const auto element_bytes = std::max<int64_t>(1, piece.src.element_size());
    const bool flat = is_flat(piece);
    const int64_t most = std::max<int64_t>(first ? 1 : 0, room_bytes / element_bytes);
    const int64_t left = numel - entry.offset;
    // A piece that cannot be cut anywhere starts a chunk.
    if (!first && (flat ? most == 0 : left > most)) break;
    const int64_t count = flat ? std::min(most, left) : left;
    if (count > 0) {
      if (count < numel) {
        queue_.copy(piece.dst.view({-1}).narrow(0, entry.offset, count),
                    piece.src.view({-1}).narrow(0, entry.offset, count));
      } else if (!copy_or_cut(entry)) {
        continue;
      }
      moved_bytes_.fetch_add(count * element_bytes);
      entry.bytes += count * element_bytes;
      room_bytes -= count * element_bytes;
      first = false;
    }
    entry.offset += count;
    if (entry.offset < numel) break;
    if (piece.arrived) chunk.pieces.push_back(piece.arrived);
    ++entry.piece;
    entry.offset = 0;
  }
  return entry.piece >= entry.pieces.size();
}

void LinkScheduler::limit_in_flight() {
  while (true) {
    EventPtr oldest;
    {
      const MutexLock lock(flight_mutex_);
      while (!in_flight_.empty() && in_flight_.front().arrived->complete()) in_flight_.pop_front();
      if (in_flight_.size() < kInFlight) return;
      oldest = in_flight_.front().arrived;
    }
    oldest->wait_complete();
  }
}

std::shared_ptr<LinkScheduler::Entry> LinkScheduler::next() {
  const MutexLock lock(mutex_);
  while (ready_.empty() && (!stopping_ || waiting_ > 0)) changed_.wait(mutex_);
  if (ready_.empty()) return nullptr;
  std::pop_heap(ready_.begin(), ready_.end(), less_urgent_);
  std::shared_ptr<Entry> entry = std::move(ready_.back());
  ready_.pop_back();
  return entry;
}

void LinkScheduler::run() {
  become_engine_thread();
  const std::shared_ptr<void> attached = frontend().attach_thread();
  const c10::InferenceMode plain(false);
  at::NoGradGuard no_grad;
  while (true) {
    // Wait before choosing, so that a transfer that becomes urgent meanwhile can be chosen.
    limit_in_flight();
    const std::shared_ptr<Entry> entry = next();
    if (!entry) break;
    // Cancelled by the requester: its memory may already be in use for something else.
    if (entry->transfer.done->complete()) {
      forget_one();
      continue;
    }
    std::exception_ptr error;
    bool no_memory = false;
    try {
      issue(entry);
      continue;
    } catch (const c10::OutOfMemoryError&) {
      error = std::current_exception();
      no_memory = !entry->begun;
    } catch (...) {
      error = std::current_exception();
    }
    try {
      if (no_memory) {
        stand_aside(entry, error);
        continue;
      }
    } catch (...) {
      error = std::current_exception();
    }
    forget_one();
    entry->transfer.begin = nullptr;
    entry->transfer.done->fail(error);
  }
  // Nobody is left to make room.
  std::vector<std::shared_ptr<Entry>> left;
  {
    const MutexLock lock(aside_->mutex);
    left.swap(aside_->entries);
  }
  for (const auto& entry : left) entry->transfer.done->fail(entry->no_memory);
}

void LinkScheduler::issue(const std::shared_ptr<Entry>& entry) {
  const auto scope = queue_.enter();
  if (!entry->begun) {
    entry->pieces = entry->transfer.begin();
    entry->begun = true;
    entry->transfer.begin = nullptr;  // the pieces hold all that is needed
    entry->begun_ms = now_ms();
  }
  // Do everything that may throw before the first copy: after it, the end of the issued copies must be signalled.
  const auto chunk = std::make_shared<Chunk>();
  chunk->entry = entry;
  const EventPtr arrived = device::make_event();
  arrived->then([chunk, uses = uses_, observer = observer_, self = arrived.get()] {
    chunk->arrived(*self, *uses, observer.get());
  });
  chunk->issued_ms = now_ms();
  {
    const MutexLock lock(flight_mutex_);
    in_flight_.push_back({arrived, chunk->issued_ms});
  }
  const int64_t before_bytes = entry->bytes;
  try {
    chunk->last = issue_chunk(*entry, *chunk);
    chunk->bytes = entry->bytes - before_bytes;
  } catch (...) {
    chunk->error = std::current_exception();
  }
  const bool over = chunk->last || chunk->error;
  queue_.signal(arrived);
  const MutexLock lock(mutex_);
  if (over) {
    --unfinished_;
  } else {
    push_ready(entry);
  }
}

}  // namespace roundpipe::transfer
