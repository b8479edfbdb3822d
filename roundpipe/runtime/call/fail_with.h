#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <roundpipe/device/event.h>

namespace roundpipe::runtime {

// Work whose errors fail its owner: a call, or one attempt to run a job. `Owner` has fail(std::exception_ptr).

// Runs `callback` once all of `events` have fired. If one fails, or the callback throws, the owner fails with that
// error. Null events count as fired.
template <typename Owner>
void then_or_fail(const std::shared_ptr<Owner>& owner, const std::vector<device::EventPtr>& events,
                  device::Event::Callback callback) {
  device::when_all(
      events,
      [owner, events, callback = std::move(callback)] {
        for (const device::EventPtr& event : events) {
          if (const std::exception_ptr error = event ? event->error() : nullptr) return owner->fail(error);
        }
        callback();
      },
      [owner](const std::exception_ptr& error) { owner->fail(error); });
}

// Runs `work` now. Returns whether it succeeded.
template <typename Owner>
bool succeeds_or_fail(Owner& owner, const std::function<void()>& work) noexcept {
  try {
    work();
    return true;
  } catch (...) {
    owner.fail(std::current_exception());
    return false;
  }
}

}  // namespace roundpipe::runtime
