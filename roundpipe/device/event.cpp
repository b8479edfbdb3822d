#include <roundpipe/device/event.h>

#include <atomic>
#include <utility>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/core/mutex.h>

namespace roundpipe::device {

namespace {

std::function<void()>& completion_hook() {
  static std::function<void()> hook;
  return hook;
}

// Never destroyed, because threads may complete events while the process ends.
struct Escaped {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::exception_ptr first;  // protected by mutex
};
Escaped& escaped() {
  static auto* instance = new Escaped;
  return *instance;
}

std::atomic<int> waiting_users{0};
std::atomic<void (*)() noexcept> wait_hook{nullptr};

void call_wait_hook() noexcept {
  require_no_locks("what a user's wait lets go on");
  if (auto* const hook = wait_hook.load()) hook();
}

void keep(std::exception_ptr error) {
  const std::lock_guard lock(escaped().mutex);
  if (!escaped().first) escaped().first = std::move(error);
  escaped().any.store(true);
}

}  // namespace

void run_callback(const Event::Callback& callback, const Event::Failed& failed) noexcept {
  try {
    try {
      callback();
    } catch (...) {
      if (!failed) throw;
      failed(std::current_exception());
    }
  } catch (...) {
    keep(std::current_exception());
  }
}

std::exception_ptr escaped_error() {
  if (!escaped().any.load()) return nullptr;
  const std::lock_guard lock(escaped().mutex);
  return escaped().first;
}

std::exception_ptr take_escaped_error() {
  const std::lock_guard lock(escaped().mutex);
  escaped().any.store(false);
  return std::exchange(escaped().first, nullptr);
}

void set_completion_hook(std::function<void()> hook) { completion_hook() = std::move(hook); }

void Event::finish(State state, std::exception_ptr error, double time_ms) noexcept {
  if (is_left_behind()) return;
  if (completion_hook()) completion_hook()();
  std::vector<Follower> followers;
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kPending) return;
    state_ = state;
    error_ = std::move(error);
    time_ms_ = time_ms;
    waiting_users.fetch_sub(std::exchange(waiting_users_, 0));
    followers.swap(followers_);
    changed_.notify_all();
  }
  for (const Follower& follower : followers) run_callback(follower.callback, follower.failed);
}

void Event::fire() noexcept { fire_at(now_ms()); }

void Event::fire_at(double time_ms) noexcept { finish(State::kFired, nullptr, time_ms); }

void Event::fail(std::exception_ptr error) noexcept { finish(State::kFailed, std::move(error), now_ms()); }

void Event::end(std::exception_ptr error) noexcept { error ? fail(std::move(error)) : fire(); }

std::unique_lock<std::mutex> Event::locked() const {
  return is_left_behind() ? std::unique_lock<std::mutex>() : std::unique_lock(mutex_);
}

bool Event::complete() const {
  const auto lock = locked();
  return state_ != State::kPending;
}

std::exception_ptr Event::error() const {
  const auto lock = locked();
  return error_;
}

double Event::time_ms() const {
  const auto lock = locked();
  return time_ms_;
}

void Event::wait() const {
  wait_complete();
  if (const std::exception_ptr failure = error()) std::rethrow_exception(failure);
}

void Event::wait_complete() const {
  if (complete()) return;
  require_own_process();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return state_ != State::kPending; });
}

bool Event::wait_for(double timeout_ms) const {
  if (complete()) return true;
  require_own_process();
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, from_ms(timeout_ms), [this] { return state_ != State::kPending; });
}

void Event::then(Callback callback, Failed failed) {
  if (!complete()) {
    require_own_process();
    std::lock_guard lock(mutex_);
    if (state_ == State::kPending) {
      followers_.push_back({std::move(callback), std::move(failed)});
      return;
    }
  }
  run_callback(callback, failed);
}

EventPtr fired_event() {
  EventPtr event = make_event();
  event->fire();
  return event;
}

void when_all(const std::vector<EventPtr>& events, Event::Callback callback, Event::Failed failed) {
  struct Join {
    std::atomic<size_t> remaining;
    Event::Callback callback;
    Event::Failed failed;
    void arrive() {
      if (remaining.fetch_sub(1) == 1) run_callback(callback, failed);
    }
  };
  const std::shared_ptr<Join> join(new Join{events.size() + 1, std::move(callback), std::move(failed)});
  for (const EventPtr& event : events) {
    if (event) {
      event->then([join] { join->arrive(); });
    } else {
      join->arrive();
    }
  }
  join->arrive();
}

WaitingUser::WaitingUser() {
  waiting_users.fetch_add(1);
  call_wait_hook();
}

WaitingUser::~WaitingUser() { waiting_users.fetch_sub(1); }

// Counts as a WaitingUser until the event completes or the wait is given up.
class UserOfEvent {
 public:
  explicit UserOfEvent(const Event& event) : event_(event) {
    {
      const std::lock_guard lock(event.mutex_);
      if (event.state_ != Event::State::kPending) return;
      ++event.waiting_users_;
      waiting_users.fetch_add(1);
    }
    call_wait_hook();
  }
  ~UserOfEvent() {
    const std::lock_guard lock(event_.mutex_);
    if (event_.waiting_users_ == 0) return;
    --event_.waiting_users_;
    waiting_users.fetch_sub(1);
  }
  UserOfEvent(const UserOfEvent&) = delete;
  UserOfEvent& operator=(const UserOfEvent&) = delete;

 private:
  const Event& event_;
};

bool WaitingUser::any() noexcept { return waiting_users.load() > 0; }

void WaitingUser::set_hook(void (*hook)() noexcept) noexcept { wait_hook.store(hook); }

namespace {

void wait_checking(const Event& event, bool interruptible) {
  constexpr double kCheckEvery_ms = 50;
  if (event.complete()) return;
  require_own_process();
  const UserOfEvent user(event);
  while (!event.wait_for(kCheckEvery_ms)) {
    if (const std::exception_ptr error = escaped_error()) std::rethrow_exception(error);
    if (interruptible) frontend().check_interrupt();
  }
}

}  // namespace

void wait_interruptible(const Event& event) {
  wait_checking(event, /*interruptible=*/true);
  event.wait();
}

void wait_unless_lost(const Event& event) { wait_checking(event, /*interruptible=*/false); }

}  // namespace roundpipe::device
