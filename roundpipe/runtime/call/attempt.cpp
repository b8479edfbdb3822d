#include <roundpipe/runtime/call/attempt.h>

#include <utility>

#include <roundpipe/core/error.h>
#include <roundpipe/runtime/call/fail_with.h>

namespace roundpipe::runtime {

using device::EventPtr;

Attempt::Attempt(CallPtr call, std::shared_ptr<JobResults> results, int number)
    : call_(std::move(call)), results_(std::move(results)), number_(number) {}

void Attempt::belongs_to(JobCheckPtr check, int run) {
  check_ = std::move(check);
  run_ = run;
}

void Attempt::runs_on(std::shared_ptr<device::Health> health) {
  if (check_) check_->runs_on(run_, health);
  health_ = std::move(health);
}

EventPtr Attempt::new_event() {
  EventPtr event = call_->new_event();
  if (!call_->options.fault_tolerant) return event;
  std::exception_ptr abandoned;
  {
    const MutexLock lock(mutex_);
    abandoned = abandoned_;
    if (!abandoned) events_.add(event);
  }
  if (abandoned) event->fail(abandoned);
  return event;
}

EventPtr Attempt::follow(const EventPtr& event) {
  if (!event || event->complete() || !call_->options.fault_tolerant) return event;
  EventPtr own = new_event();
  event->then([event, own] { own->end(event->error()); }, [own](const std::exception_ptr& error) { own->fail(error); });
  return own;
}

void Attempt::then(const std::vector<EventPtr>& events, device::Event::Callback callback) {
  then_or_fail(shared_from_this(), events, std::move(callback));
}

bool Attempt::succeeds(const std::function<void()>& work) noexcept { return succeeds_or_fail(*this, work); }

namespace {

// Whether the job still waits for this attempt.
bool is_needed(JobResults& results, int attempt) {
  try {
    results.read(attempt, [] {});
    return true;
  } catch (const Cancelled&) {
    return false;
  }
}

}  // namespace

void Attempt::fail(const std::exception_ptr& error) {
  if (broken_.load() || call_->failed() || !is_needed(*results_, number_)) return;
  const std::exception_ptr failure = health_ ? health_->failure_after_error() : nullptr;
  if (failure && call_->options.fault_tolerant) {
    broken_.store(true);
  } else {
    call_->fail(failure ? failure : error);
  }
}

void Attempt::abandon() {
  if (!call_->options.fault_tolerant) return;
  std::vector<EventPtr> events;
  std::exception_ptr error;
  broken_.store(true);
  {
    const MutexLock lock(mutex_);
    if (abandoned_) return;
    abandoned_ = error =
        std::make_exception_ptr(Cancelled("[devices] a device has failed, so this attempt to run a job is abandoned"));
    events = events_.take();
  }
  for (const EventPtr& event : events) event->fail(error);
}

std::exception_ptr Attempt::error() const {
  {
    const MutexLock lock(mutex_);
    if (abandoned_) return abandoned_;
  }
  return call_->error();
}

void Attempt::deliver(const EventPtr& landed, const JobResult& result, Contents contents, std::function<void()> publish,
                      EventPtr done) {
  then({landed}, [self = shared_from_this(), result, contents = std::move(contents), publish = std::move(publish),
                  done = std::move(done)] {
    if (self->only_checks()) {
      self->claim(result, contents);
      return;
    }
    const uint32_t checksum = self->check_ ? checksum_of(contents()) : 0;
    if (!self->results_->deliver(self->number_, result, publish)) return;
    if (self->check_) self->check_->saw(self->run_, result, checksum);
    if (done) done->fire();
  });
}

bool Attempt::claim(const JobResult& result, const Contents& contents) {
  if (!results_->claim(number_, result)) return false;
  if (check_) check_->saw(run_, result, checksum_of(contents()));
  return !only_checks();
}

bool Attempt::finish(const std::function<void()>& publish) {
  if (broken_.load() && !call_->failed()) return false;
  return results_->finish(number_, publish);
}

}  // namespace roundpipe::runtime
