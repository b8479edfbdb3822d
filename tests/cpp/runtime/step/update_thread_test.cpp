#include <roundpipe/runtime/step/update_thread.h>

#include <atomic>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/device/event.h>

using roundpipe::device::make_event;
using roundpipe::device::take_escaped_error;
using roundpipe::runtime::UpdateThread;
using Kind = roundpipe::runtime::UpdateThread::Kind;

namespace update_thread_test {

void submit(const UpdateThread::Order& order, std::function<void()> work) {
  UpdateThread::Work prepared = UpdateThread::prepare(order, std::move(work));
  CHECK(UpdateThread::instance().submit(prepared));
}

TEST_CASE("update thread: of what is ready, older steps, then norms, then the lowest layer") {
  const auto begun = make_event();
  const auto go_on = make_event();
  const auto done = make_event();
  submit({0, Kind::kNorm, 0}, [=] {
    begun->fire();
    go_on->wait();
  });
  begun->wait();  // all that follows is ready before the next choice
  std::vector<int> order;
  submit({9, Kind::kUpdate, 3}, [&] {
    order.push_back(6);
    done->fire();
  });
  submit({9, Kind::kUpdate, 1}, [&] { order.push_back(5); });
  submit({9, Kind::kNorm, 7}, [&] { order.push_back(4); });
  submit({8, Kind::kUpdate, 2}, [&] { order.push_back(2); });
  submit({8, Kind::kUpdate, 2}, [&] { order.push_back(3); });
  submit({8, Kind::kUpdate, 0}, [&] { order.push_back(1); });
  go_on->fire();
  done->wait();
  CHECK(order == std::vector<int>({1, 2, 3, 4, 5, 6}));
}

TEST_CASE("update thread: draining waits for what is under way, and for what that leads to") {
  UpdateThread& thread = UpdateThread::instance();
  const auto begun = make_event();
  const auto go_on = make_event();
  std::atomic<int> done = 0;
  submit({1, Kind::kUpdate, 0}, [&] {
    begun->fire();
    go_on->wait();
    submit({1, Kind::kUpdate, 1}, [&] { ++done; });
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

TEST_CASE("update thread: goes on after work that throws, whose error is kept") {
  submit({1, Kind::kUpdate, 0}, [] { throw std::runtime_error("broken"); });
  bool went_on = false;
  submit({1, Kind::kUpdate, 1}, [&] { went_on = true; });
  UpdateThread::instance().drain();
  CHECK(went_on);
  CHECK(take_escaped_error() != nullptr);
}

}  // namespace update_thread_test
