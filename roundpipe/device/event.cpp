#include <roundpipe/device/event.h>

#include <atomic>
#include <utility>

#include <roundpipe/core/clock.h>

namespace roundpipe::device {

namespace {
std::function<void()>& completion_hook() {
  static std::function<void()> hook;
  return hook;
}
}  // namespace

void set_completion_hook(std::function<void()> hook) { completion_hook() = std::move(hook); }

void Event::finish(State state, std::exception_ptr error) {
  if (completion_hook()) completion_hook()();
  std::vector<Callback> callbacks;
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kPending) return;
    state_ = state;
    error_ = std::move(error);
    time_ms_ = now_ms();
    callbacks.swap(callbacks_);
    changed_.notify_all();
  }
  for (Callback& callback : callbacks) callback();
}

void Event::fire() { finish(State::kFired, nullptr); }

void Event::fail(std::exception_ptr error) { finish(State::kFailed, std::move(error)); }

bool Event::complete() const {
  std::lock_guard lock(mutex_);
  return state_ != State::kPending;
}

std::exception_ptr Event::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

void Event::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return state_ != State::kPending; });
  if (error_) {
    const std::exception_ptr error = error_;
    lock.unlock();
    std::rethrow_exception(error);
  }
}

void Event::wait_complete() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return state_ != State::kPending; });
}

bool Event::wait_for(double timeout_ms) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, from_ms(timeout_ms), [this] { return state_ != State::kPending; });
}

void Event::then(Callback callback) {
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kPending) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

double Event::time_ms() const {
  std::lock_guard lock(mutex_);
  return time_ms_;
}

EventPtr fired_event() {
  EventPtr event = make_event();
  event->fire();
  return event;
}

void when_all(const std::vector<EventPtr>& events, Event::Callback callback) {
  auto remaining = std::make_shared<std::atomic<size_t>>(events.size() + 1);
  auto shared = std::make_shared<Event::Callback>(std::move(callback));
  const auto arrive = [remaining, shared] {
    if (remaining->fetch_sub(1) == 1) (*shared)();
  };
  for (const EventPtr& event : events) {
    if (event) {
      event->then(arrive);
    } else {
      arrive();
    }
  }
  arrive();
}

namespace {
std::function<void()>& interrupt_check() {
  static std::function<void()> check;
  return check;
}
}  // namespace

void set_interrupt_check(std::function<void()> check) { interrupt_check() = std::move(check); }

void wait_interruptible(const Event& event) {
  constexpr double kCheckEvery_ms = 50;
  while (!event.wait_for(kCheckEvery_ms)) {
    if (interrupt_check()) interrupt_check()();
  }
  event.wait();
}

}  // namespace roundpipe::device
