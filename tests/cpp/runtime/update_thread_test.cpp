#include <roundpipe/runtime/update_thread.h>

#include <atomic>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/device/event.h>

using roundpipe::device::make_event;
using roundpipe::runtime::UpdateThread;
using Kind = roundpipe::runtime::UpdateThread::Kind;

TEST_CASE("update thread: of what is ready, older steps, then norms, then the lowest layer") {
  UpdateThread& thread = UpdateThread::instance();
  const auto begun = make_event();
  const auto go_on = make_event();
  const auto done = make_event();
  thread.submit({0, Kind::kNorm, 0}, [=] {
    begun->fire();
    go_on->wait();
  });
  begun->wait();  // what follows is all ready before the next choice
  std::vector<int> order;
  thread.submit({9, Kind::kUpdate, 3}, [&] {
    order.push_back(6);
    done->fire();
  });
  thread.submit({9, Kind::kUpdate, 1}, [&] { order.push_back(5); });
  thread.submit({9, Kind::kNorm, 7}, [&] { order.push_back(4); });
  thread.submit({8, Kind::kUpdate, 2}, [&] { order.push_back(2); });
  thread.submit({8, Kind::kUpdate, 2}, [&] { order.push_back(3); });
  thread.submit({8, Kind::kUpdate, 0}, [&] { order.push_back(1); });
  go_on->fire();
  done->wait();
  CHECK(order == std::vector<int>({1, 2, 3, 4, 5, 6}));
}

TEST_CASE("update thread: draining waits for what is under way, and for what that leads to") {
  UpdateThread& thread = UpdateThread::instance();
  const auto begun = make_event();
  const auto go_on = make_event();
  std::atomic<int> done = 0;
  thread.submit({1, Kind::kUpdate, 0}, [&] {
    begun->fire();
    go_on->wait();
    thread.submit({1, Kind::kUpdate, 1}, [&] { ++done; });
    ++done;
  });
  begun->wait();
  std::thread drains([&] {
    thread.drain();
    CHECK(done == 2);
    done = 3;
  });
  go_on->fire();
  drains.join();
  CHECK(done == 3);
  thread.drain();  // nothing to do
}
