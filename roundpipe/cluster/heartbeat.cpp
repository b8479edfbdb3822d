#include <roundpipe/cluster/heartbeat.h>

#include <algorithm>
#include <thread>
#include <vector>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>

namespace roundpipe::cluster {

namespace {

constexpr std::chrono::milliseconds kLongestInterval{1000};
// A rank is silent if it has written no sign for so many intervals.
constexpr int kSilentIntervals = 3;

std::string beat_key(int rank) { return concat("roundpipe/beat/", rank); }
std::string error_key(int rank) { return concat("roundpipe/error/", rank); }

constexpr const char* kNoStore =
    "the store of the process group does not answer: the process that serves it, often the launcher on the first "
    "machine, is gone or out of reach";

// What the store tells: which ranks are silent, and what the others have said of their errors. Blocks for
// kSilentIntervals.
std::string look(c10d::Store& store, int own, int size, std::chrono::milliseconds interval) {
  const auto read = [&](const std::string& key) { return store.check({key}) ? store.get_to_str(key) : std::string(); };
  std::vector<std::string> before;
  for (int rank = 0; rank < size; ++rank) before.push_back(read(beat_key(rank)));
  std::this_thread::sleep_for(interval * kSilentIntervals);
  std::string silent;
  std::string told;
  for (int rank = 0; rank < size; ++rank) {
    if (rank == own) continue;
    if (const std::string error = read(error_key(rank)); !error.empty()) {
      told += concat("; rank ", rank, " could not exchange ", error);
    } else if (read(beat_key(rank)) == before[static_cast<size_t>(rank)]) {
      silent += concat(silent.empty() ? "" : ", ", rank);
    }
  }
  if (silent.empty()) return told.empty() ? "all ranks show signs of life; the network may be cut" : told.substr(2);
  return concat("rank ", silent, " gives no sign of life: it died, hangs or is out of reach", told);
}

}  // namespace

struct Heartbeat::State {
  c10::intrusive_ptr<c10d::Store> store;  // a connection of its own
  Mutex mutex;
  Condition changed;
  bool dropped ROUNDPIPE_GUARDED_BY(mutex) = false;
  std::string failure ROUNDPIPE_GUARDED_BY(mutex);  // empty: none
};

Heartbeat::Heartbeat(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                     std::chrono::milliseconds timeout)
    : rank_(rank),
      size_(size),
      interval_(std::clamp(timeout / 20, std::chrono::milliseconds(10), kLongestInterval)),
      state_(std::make_shared<State>()) {
  if (!store) return;
  state_->store = store->clone();
  std::thread([state = state_, interval = interval_, key = beat_key(rank)] {
    become_engine_thread();
    for (int64_t beat = 0;; ++beat) {
      try {
        state->store->set(key, std::to_string(beat));
      } catch (const std::exception&) {
        // The store is out of reach: others see this rank as silent, and this one cannot name any.
      }
      const MutexLock lock(state->mutex);
      if (!state->dropped) state->changed.wait_for(state->mutex, static_cast<double>(interval.count()));
      if (state->dropped) return;
    }
  }).detach();
}

Heartbeat::~Heartbeat() {
  if (is_left_behind()) return;
  {
    const MutexLock lock(state_->mutex);
    state_->dropped = true;
  }
  state_->changed.notify_all();
}

std::string Heartbeat::find_cause() const {
  if (!state_->store) return "";
  struct Search {
    Mutex mutex;
    Condition changed;
    std::string found ROUNDPIPE_GUARDED_BY(mutex);
  };
  // On a thread of its own: the store of a machine that is out of reach may never answer.
  const auto search = std::make_shared<Search>();
  std::thread([search, store = state_->store, own = rank_, size = size_, interval = interval_] {
    become_engine_thread();
    std::string found;
    try {
      found = look(*store, own, size, interval);
    } catch (const std::exception&) {
      found = kNoStore;
    }
    {
      const MutexLock lock(search->mutex);
      search->found = found;
    }
    search->changed.notify_all();
  }).detach();
  const double end_ms = now_ms() + static_cast<double>((interval_ * kSilentIntervals * 3 / 2).count());
  const MutexLock lock(search->mutex);
  for (double now = now_ms(); search->found.empty() && now < end_ms; now = now_ms()) {
    search->changed.wait_for(search->mutex, end_ms - now);
  }
  return search->found.empty() ? kNoStore : search->found;
}

void Heartbeat::fail(const std::string& what, const std::string& reason) {
  const std::string cause = find_cause();
  const MutexLock lock(state_->mutex);
  if (!state_->failure.empty()) return;
  state_->failure = concat("[cluster] ", what, " could not be exchanged with the other nodes: ",
                           cause.empty() ? reason : concat(cause, " (", reason, ")"),
                           "; nothing after that was updated: start all ranks again from the last checkpoint");
  if (!state_->store) return;
  // On a thread of its own, for the same reason.
  std::thread([state = state_, key = error_key(rank_), said = concat(what, ": ", reason)] {
    become_engine_thread();
    try {
      state->store->set(key, said);
    } catch (const std::exception&) {
      // Nobody can be told.
    }
  }).detach();
}

void Heartbeat::throw_failure() {
  const MutexLock lock(state_->mutex);
  if (!state_->failure.empty()) throw Error(state_->failure);
}

}  // namespace roundpipe::cluster
