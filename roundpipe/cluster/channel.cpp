#include <roundpipe/cluster/channel.h>

#include <deque>
#include <thread>
#include <vector>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/device/event.h>

namespace roundpipe::cluster {

struct Channel::State {
  Mutex mutex;
  Condition changed;
  std::deque<std::function<void()>> waiting ROUNDPIPE_GUARDED_BY(mutex);
  bool working ROUNDPIPE_GUARDED_BY(mutex) = false;
  bool dropped ROUNDPIPE_GUARDED_BY(mutex) = false;

  void drain() {
    const MutexLock lock(mutex);
    while (!waiting.empty() || working) changed.wait(mutex);
  }
  static Mutex& all_mutex() {
    static auto* mutex = new Mutex;  // never destroyed: channels end with the process
    return *mutex;
  }
  static std::vector<std::weak_ptr<State>>& all() ROUNDPIPE_REQUIRES(all_mutex()) {
    static auto* all = new std::vector<std::weak_ptr<State>>;
    return *all;
  }
};

Channel::Channel() : state_(std::make_shared<State>()) {
  {
    const MutexLock lock(State::all_mutex());
    std::erase_if(State::all(), [](const auto& state) { return state.expired(); });
    State::all().push_back(state_);
  }
  std::thread([state = state_] { run(state); }).detach();
}

Channel::~Channel() {
  if (is_left_behind()) return;
  {
    const MutexLock lock(state_->mutex);
    state_->dropped = true;
  }
  state_->changed.notify_all();
}

void Channel::submit(std::function<void()> work) {
  {
    const MutexLock lock(state_->mutex);
    state_->waiting.push_back(std::move(work));
  }
  state_->changed.notify_all();
}

void Channel::drain_all() {
  std::vector<std::shared_ptr<State>> states;
  {
    const MutexLock lock(State::all_mutex());
    for (const std::weak_ptr<State>& state : State::all()) states.push_back(state.lock());
  }
  for (const auto& state : states) {
    if (state) state->drain();
  }
}

void Channel::run(const std::shared_ptr<State>& state) {
  become_engine_thread();
  std::shared_ptr<void> attached;
  while (true) {
    std::function<void()> work;
    {
      const MutexLock lock(state->mutex);
      while (state->waiting.empty() && !state->dropped) state->changed.wait(state->mutex);
      if (state->waiting.empty()) {
        // The frontend may be gone as well: a model that lives until the process ends drops its channels last.
        if (engine_has_ended()) static_cast<void>(new std::shared_ptr<void>(std::move(attached)));
        return;
      }
      work = std::move(state->waiting.front());
      state->waiting.pop_front();
      state->working = true;
    }
    if (!attached) attached = frontend().attach_thread();
    device::run_callback(work, nullptr);
    work = nullptr;  // may hold the last reference to a model
    const MutexLock lock(state->mutex);
    state->working = false;
    if (state->waiting.empty()) state->changed.notify_all();
  }
}

}  // namespace roundpipe::cluster
