#include <roundpipe/device/event.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/frontend.h>

using namespace roundpipe::device;
using roundpipe::now_ms;

namespace {

std::exception_ptr error_named(const char* what) { return std::make_exception_ptr(std::runtime_error(what)); }

std::string message_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  }
}

}  // namespace

TEST_CASE("event: pending, then fired for good") {
  Event event;
  CHECK_FALSE(event.complete());
  CHECK_FALSE(event.wait_for(0));
  CHECK(event.time_ms() == 0);
  const double before_ms = now_ms();
  event.fire();
  CHECK(event.complete());
  CHECK(event.wait_for(0));
  CHECK(event.time_ms() >= before_ms);
  CHECK(event.time_ms() <= now_ms());
  event.wait();
  event.fail(error_named("too late"));
  CHECK(event.error() == nullptr);
}

TEST_CASE("event: work may have been done before anybody noticed") {
  Event event;
  double seen_ms = 0;
  event.then([&] { seen_ms = event.time_ms(); });
  event.fire_at(12.5);
  CHECK(seen_ms == 12.5);
  CHECK(event.time_ms() == 12.5);
}

TEST_CASE("event: the first error wins, wait rethrows it, wait_for does not") {
  Event event;
  event.fail(error_named("first"));
  event.fail(error_named("second"));
  event.fire();
  CHECK(message_of(event.error()) == "first");
  CHECK(event.wait_for(0));
  CHECK_THROWS_WITH_AS(event.wait(), "first", std::runtime_error);
  CHECK_THROWS_WITH_AS(event.wait(), "first", std::runtime_error);
}

TEST_CASE("event: callbacks run once, in order, on the completing thread; late ones at once on the caller's") {
  Event event;
  std::vector<int> order;
  std::thread::id where;
  event.then([&] { order.push_back(1); });
  event.then([&] {
    order.push_back(2);
    where = std::this_thread::get_id();
  });
  CHECK(order.empty());
  std::thread other([&] { event.fire(); });
  const std::thread::id other_id = other.get_id();
  other.join();
  CHECK(where == other_id);
  event.then([&] { order.push_back(3); });
  event.fire();
  CHECK(order == std::vector<int>{1, 2, 3});
}

TEST_CASE("event: a callback may use the event and add another one") {
  EventPtr event = make_event();
  bool inner = false;
  event->then([&] {
    CHECK(event->complete());
    event->then([&] { inner = true; });
  });
  event->fire();
  CHECK(inner);
}

TEST_CASE("event: many threads race to complete, wait and subscribe; exactly one completion, every callback once") {
  constexpr int kRounds = 200;
  constexpr int kThreads = 6;
  for (int round = 0; round < kRounds; ++round) {
    const EventPtr event = make_event();
    std::atomic<int> callbacks{0};
    int published = 0;  // written before fire, read after wait: fire must order them
    std::vector<std::thread> threads;
    threads.emplace_back([&] {
      published = round + 1;
      event->fire();
    });
    for (int t = 1; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        event->then([&] { callbacks.fetch_add(1); });
        if (t % 2 == 0) {
          event->wait();
        } else {
          while (!event->wait_for(1)) {
          }
        }
        CHECK(published == round + 1);
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(callbacks.load() == kThreads - 1);
    CHECK(event->error() == nullptr);
  }
}

TEST_CASE("fired_event: complete from the start") {
  CHECK(fired_event()->complete());
  CHECK(fired_event()->error() == nullptr);
}

TEST_CASE("when_all: after the last one, failed and null events included, exactly once") {
  int calls = 0;
  when_all({}, [&] { ++calls; });
  CHECK(calls == 1);
  when_all({nullptr, fired_event(), nullptr}, [&] { ++calls; });
  CHECK(calls == 2);

  const EventPtr a = make_event();
  const EventPtr b = make_event();
  when_all({a, nullptr, b, a}, [&] { ++calls; });
  a->fail(error_named("broken"));
  CHECK(calls == 2);
  b->fire();
  CHECK(calls == 3);
}

TEST_CASE("when_all: events that complete on several threads at once") {
  constexpr int kRounds = 200;
  constexpr int kThreads = 4;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<EventPtr> events;
    for (int t = 0; t < kThreads; ++t) events.push_back(make_event());
    std::vector<int> published(kThreads, 0);
    std::atomic<int> calls{0};
    EventPtr done = make_event();
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        published[t] = 1;
        events[t]->fire();
      });
    }
    when_all(events, [&] {
      calls.fetch_add(1);
      for (const int value : published) CHECK(value == 1);
      done->fire();
    });
    done->wait();
    for (std::thread& thread : threads) thread.join();
    CHECK(calls.load() == 1);
  }
}

TEST_CASE("wait_interruptible: the event's error, or what the interrupt check throws while it is pending") {
  CHECK_NOTHROW(wait_interruptible(*fired_event()));
  Event failed;
  failed.fail(error_named("broken"));
  CHECK_THROWS_WITH_AS(wait_interruptible(failed), "broken", std::runtime_error);

  int checks = 0;
  struct Interrupting final : roundpipe::Frontend {
    explicit Interrupting(int& checks) : checks(checks) {}
    void check_interrupt() override {
      if (++checks == 2) throw std::domain_error("interrupted");
    }
    int& checks;
  };
  roundpipe::set_frontend(std::make_unique<Interrupting>(checks));
  Event pending;
  CHECK_THROWS_AS(wait_interruptible(pending), std::domain_error);
  CHECK(checks == 2);
  roundpipe::set_frontend(nullptr);
}

TEST_CASE("event: wait_complete blocks until it has fired or failed, and throws neither way") {
  for (const bool fails : {false, true}) {
    const EventPtr event = make_event();
    std::thread other([&] {
      if (fails) {
        event->fail(std::make_exception_ptr(std::runtime_error("it failed")));
      } else {
        event->fire();
      }
    });
    event->wait_complete();
    CHECK(event->complete());
    CHECK((event->error() != nullptr) == fails);
    other.join();
  }
}

TEST_CASE("event: a callback that throws skips none behind it, and what it threw goes to whoever is to fail by it") {
  for (const bool late : {false, true}) {
    const EventPtr event = make_event();
    if (late) event->fire();
    std::vector<int> ran;
    std::string failed;
    event->then([&] { ran.push_back(1); });
    event->then(
        [&] {
          ran.push_back(2);
          throw std::runtime_error("no room");
        },
        [&](const std::exception_ptr& error) { failed = message_of(error); });
    event->then([&] { ran.push_back(3); });
    CHECK_NOTHROW(event->fire());
    CHECK(ran == std::vector<int>{1, 2, 3});
    CHECK(failed == "no room");
    CHECK(event->error() == nullptr);
    CHECK(escaped_error() == nullptr);
  }
}

TEST_CASE("when_all: what the callback throws goes to whoever is to fail by it") {
  for (const bool late : {false, true}) {
    const EventPtr first = make_event(), second = make_event();
    if (late) first->fire();
    std::string failed;
    when_all(
        {first, nullptr, second}, [] { throw std::runtime_error("no room"); },
        [&](const std::exception_ptr& error) { failed = message_of(error); });
    CHECK(failed.empty());
    first->fire();
    second->fail(error_named("broken"));
    CHECK(failed == "no room");
  }
}

TEST_CASE("wait_interruptible: throws what escaped from a callback instead of waiting for ever") {
  const EventPtr first = make_event(), never = make_event();
  first->then([&] {
    throw std::domain_error("nobody's");
    never->fire();
  });
  first->fire();
  CHECK(message_of(escaped_error()) == "nobody's");
  CHECK_THROWS_AS(wait_interruptible(*never), std::domain_error);
  CHECK_THROWS_AS(wait_unless_lost(*never), std::domain_error);
  CHECK_NOTHROW(wait_interruptible(*first));
  // The first one is kept.
  never->then([] { throw std::runtime_error("later"); });
  never->fire();
  CHECK(message_of(take_escaped_error()) == "nobody's");
  CHECK(escaped_error() == nullptr);
}
