#include <roundpipe/device/event_list.h>

#include <vector>

#include <doctest/doctest.h>

using roundpipe::device::EventList;
using roundpipe::device::EventPtr;
using roundpipe::device::make_event;

TEST_CASE("event list: adding costs the same however many are pending") {
  EventList list;
  std::vector<EventPtr> pending;
  for (int64_t added = 1; added <= 100'000; ++added) {
    list.add(pending.emplace_back(make_event()));
    REQUIRE(list.looked_at() <= 2 * added);
  }
  CHECK(list.take() == pending);
  CHECK(list.size() == 0);
}

TEST_CASE("event list: complete events are forgotten, pending ones never") {
  EventList list;
  std::vector<EventPtr> pending;
  for (int i = 0; i < 10'000; ++i) {
    const EventPtr event = make_event();
    list.add(event);
    if (i % 100 == 0) {
      pending.push_back(event);
    } else {
      event->fire();
    }
    REQUIRE(list.size() <= 2 * pending.size() + 64);
  }
  CHECK(list.looked_at() <= 20'000);
  std::vector<EventPtr> left = list.take();
  std::erase_if(left, [](const EventPtr& event) { return event->complete(); });
  CHECK(left == pending);
}
