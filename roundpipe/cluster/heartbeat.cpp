#include <roundpipe/cluster/heartbeat.h>

#include <algorithm>
#include <string_view>
#include <thread>
#include <vector>

#include <roundpipe/cluster/differences.h>
#include <roundpipe/core/clock.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/mutex.h>

namespace roundpipe::cluster {

namespace {

constexpr std::chrono::milliseconds kLongestInterval{1000};
// A rank is silent if it has written no sign for so many intervals.
constexpr int kSilentIntervals = 3;
// The same, where the store no longer answers: what was read last is all that there will be.
constexpr int kSilentIntervalsAtLast = 2;
// How long a failure waits for the signs of ranks that have just ended; not where one is silent for so long that those
// that ended with it are, too.
constexpr double kSearchIntervals = 4.5;
constexpr int kSilentWithOthersIntervals = 5;

std::string beat_key(int rank) { return concat("roundpipe/beat/", rank); }

constexpr const char* kNoStore =
    "the store of the process group does not answer: the process that serves it, rank 0 or the launcher on its "
    "machine, is gone or out of reach";

// A sign is a number that grows and, after a space, what could not be exchanged.
std::string_view error_in(std::string_view sign) {
  const size_t space = sign.find(' ');
  return space == std::string_view::npos ? std::string_view() : sign.substr(space + 1);
}

}  // namespace

struct Heartbeat::State {
  // Those that live; the thread of each ends with the process at the latest.
  struct All {
    ~All();
    Mutex mutex;
    std::vector<std::weak_ptr<State>> states ROUNDPIPE_GUARDED_BY(mutex);
  };
  static All all;

  struct Sign {
    std::string value;
    double changed_ms = 0.0;  // when it was read first
  };

  State(int own, int ranks, std::chrono::milliseconds between)
      : rank(own), size(ranks), interval_ms(static_cast<double>(between.count())) {}

  const int rank;
  const int size;
  const double interval_ms;
  c10::intrusive_ptr<c10d::Store> store;  // a connection of its own, for the thread alone; null: there are no signs
  Mutex mutex;
  Condition changed;
  bool dropped ROUNDPIPE_GUARDED_BY(mutex) = false;
  bool lives ROUNDPIPE_GUARDED_BY(mutex) = false;       // the thread does, and has the store
  std::string failure ROUNDPIPE_GUARDED_BY(mutex);      // empty: none
  std::string to_tell ROUNDPIPE_GUARDED_BY(mutex);      // what could not be exchanged here; empty: nothing
  std::vector<Sign> signs ROUNDPIPE_GUARDED_BY(mutex);  // by rank
  double looked_ms ROUNDPIPE_GUARDED_BY(mutex) = 0.0;   // when the store answered last

  void live();
  void end();
  void look(std::vector<bool>& known);
  std::vector<int> silent(int intervals) const ROUNDPIPE_REQUIRES(mutex);
  std::string cause() const ROUNDPIPE_REQUIRES(mutex);
};

Heartbeat::State::All Heartbeat::State::all;

Heartbeat::State::All::~All() {
  if (is_left_behind()) return;
  std::vector<std::shared_ptr<State>> living;
  {
    const MutexLock lock(mutex);
    for (const std::weak_ptr<State>& state : states) living.push_back(state.lock());
  }
  for (const std::shared_ptr<State>& state : living) {
    if (state) state->end();
  }
}

// The life of the thread.
void Heartbeat::State::live() {
  std::vector<bool> known(static_cast<size_t>(size), false);
  for (int64_t beat = 0;; ++beat) {
    std::string sign = std::to_string(beat);
    {
      const MutexLock lock(mutex);
      if (dropped) return;
      if (!to_tell.empty()) sign += concat(" ", to_tell);
    }
    try {
      store->set(beat_key(rank), sign);
      look(known);
    } catch (const std::exception&) {
      // The store is out of reach: what was read before it counts.
    }
    const MutexLock lock(mutex);
    if (!dropped) changed.wait_for(mutex, interval_ms);
  }
}

// Ends the thread, at most an interval after its store has answered: a store in a file that a process left in the
// middle of a record makes the others read for ever. A store out of reach answers late or never, and is not waited for.
void Heartbeat::State::end() {
  const MutexLock lock(mutex);
  dropped = true;
  changed.notify_all();
  const double end_ms = now_ms() + static_cast<double>(kLongestInterval.count());
  for (double now = now_ms(); lives && now < end_ms; now = now_ms()) changed.wait_for(mutex, end_ms - now);
}

// Reads the others' signs. `known`: by rank, whether it has ever written one: a store waits for what it has not got.
void Heartbeat::State::look(std::vector<bool>& known) {
  std::vector<int> ranks;
  std::vector<std::string> keys;
  for (int other = 0; other < size; ++other) {
    if (other == rank) continue;
    const auto place = static_cast<size_t>(other);
    if (!known[place]) known[place] = store->check({beat_key(other)});
    if (!known[place]) continue;
    ranks.push_back(other);
    keys.push_back(beat_key(other));
  }
  const std::vector<std::vector<uint8_t>> values =
      keys.empty() ? std::vector<std::vector<uint8_t>>() : store->multiGet(keys);
  const MutexLock lock(mutex);
  looked_ms = now_ms();
  for (size_t i = 0; i < ranks.size(); ++i) {
    Sign& sign = signs[static_cast<size_t>(ranks[i])];
    std::string value(values[i].begin(), values[i].end());
    if (value != sign.value) sign = {std::move(value), looked_ms};
  }
  changed.notify_all();
}

// The ranks that had written nothing for so many intervals when the store answered last, and have told of no error.
std::vector<int> Heartbeat::State::silent(int intervals) const {
  std::vector<int> found;
  for (int other = 0; other < size; ++other) {
    const Sign& sign = signs[static_cast<size_t>(other)];
    if (other != rank && error_in(sign.value).empty() && sign.changed_ms + intervals * interval_ms <= looked_ms) {
      found.push_back(other);
    }
  }
  return found;
}

std::string Heartbeat::State::cause() const {
  const bool answers = looked_ms + kSilentIntervals * interval_ms > now_ms();
  const std::vector<int> missing = silent(answers ? kSilentIntervals : kSilentIntervalsAtLast);
  std::string told;
  for (int other = 0; other < size; ++other) {
    const std::string_view error = error_in(signs[static_cast<size_t>(other)].value);
    if (!error.empty()) told += concat("; rank ", other, " could not exchange ", error);
  }
  if (!missing.empty()) {
    return concat(ranks_in_words(missing),
                  missing.size() == 1 ? " gives no sign of life: it died, hangs or is out of reach"
                                      : " give no sign of life: they died, hang or are out of reach",
                  told);
  }
  if (!answers) return kNoStore + told;
  return told.empty() ? "all ranks show signs of life; the network may be cut" : told.substr(2);
}

Heartbeat::Heartbeat(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                     std::chrono::milliseconds timeout)
    : state_(std::make_shared<State>(rank, size,
                                     std::clamp(timeout / 20, std::chrono::milliseconds(10), kLongestInterval))) {
  if (!store) return;
  state_->store = store->clone();
  {
    const MutexLock lock(state_->mutex);
    state_->lives = true;
    state_->looked_ms = now_ms();
    state_->signs.assign(static_cast<size_t>(size), {"", state_->looked_ms});
  }
  {
    const MutexLock lock(State::all.mutex);
    std::erase_if(State::all.states, [](const auto& state) { return state.expired(); });
    State::all.states.push_back(state_);
  }
  std::thread([state = state_] {
    become_engine_thread();
    state->live();
    state->store.reset();
    const MutexLock lock(state->mutex);
    state->lives = false;
    state->changed.notify_all();
  }).detach();
}

Heartbeat::~Heartbeat() {
  if (!is_left_behind()) state_->end();
}

void Heartbeat::fail(const std::string& what, const std::string& reason) {
  State& state = *state_;
  const MutexLock lock(state.mutex);
  std::string cause;
  if (!state.signs.empty()) {
    const double end_ms = now_ms() + kSearchIntervals * state.interval_ms;
    for (double now = now_ms(); now < end_ms && state.silent(kSilentWithOthersIntervals).empty(); now = now_ms()) {
      state.changed.wait_for(state.mutex, end_ms - now);
    }
    cause = state.cause();
  }
  if (!state.failure.empty()) return;
  state.failure = concat("[cluster] ", what, " could not be exchanged with the other nodes: ",
                         cause.empty() ? reason : concat(cause, " (", reason, ")"),
                         "; nothing after that was updated: start all ranks again from the last checkpoint");
  state.to_tell = concat(what, ": ", reason);
  state.changed.notify_all();
}

void Heartbeat::throw_failure() {
  const MutexLock lock(state_->mutex);
  if (!state_->failure.empty()) throw Error(state_->failure);
}

}  // namespace roundpipe::cluster
