#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <roundpipe/device/event.h>

namespace roundpipe::device {

// Collects events that will be failed or awaited together. The list drops complete events from time to time, so that it
// stays below about twice the pending ones, and adding an event takes constant time on average.
// Thread safety: none.
class EventList {
 public:
  void add(EventPtr event) {
    if (events_.size() >= sweep_at_) {
      looked_at_ += static_cast<int64_t>(events_.size());
      std::erase_if(events_, [](const EventPtr& old) { return old->complete(); });
      sweep_at_ = std::max(kFewest, 2 * events_.size());
    }
    events_.push_back(std::move(event));
  }

  // Takes all events that may be pending and leaves the list empty.
  std::vector<EventPtr> take() {
    sweep_at_ = kFewest;
    return std::exchange(events_, {});
  }

  size_t size() const { return events_.size(); }
  // How many times the list has checked an event for completion.
  int64_t looked_at() const { return looked_at_; }

 private:
  static constexpr size_t kFewest = 64;
  std::vector<EventPtr> events_;
  size_t sweep_at_ = kFewest;
  int64_t looked_at_ = 0;
};

}  // namespace roundpipe::device
