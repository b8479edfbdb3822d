#include <roundpipe/optim/thread_pool.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/memory/numa.h>
#include <roundpipe/optim/cores.h>

using namespace roundpipe::optim;

TEST_CASE("thread pool: every element once, in parts of whole grains") {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads, /*pinned=*/threads == 5);
    CHECK(pool.threads() == threads);
    for (const int64_t count : {0, 1, 99, 100, 101, 12345}) {
      std::vector<std::atomic<int>> visits(static_cast<size_t>(count));
      std::atomic<bool> whole = true;
      pool.for_ranges(count, 100, [&](int64_t begin, int64_t end) {
        if (begin % 100 != 0 || (end % 100 != 0 && end != count)) whole = false;
        for (int64_t i = begin; i < end; ++i) ++visits[i];
      });
      CHECK(whole);
      for (const auto& visited : visits) REQUIRE(visited == 1);
    }
  }
}

TEST_CASE("thread pool: little work stays with the caller") {
  ThreadPool pool(4);
  const auto caller = std::this_thread::get_id();
  for (int call = 0; call < 100; ++call) {
    pool.for_ranges(64, 64, [&](int64_t, int64_t) { REQUIRE(std::this_thread::get_id() == caller); });
  }
}

TEST_CASE("thread pool: an error comes back to its caller once all parts are done") {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    CHECK_THROWS_WITH_AS(pool.for_ranges(1000, 1, [](int64_t, int64_t) { throw std::out_of_range("part"); }), "part",
                         std::out_of_range);
    std::atomic<int64_t> sum = 0;
    pool.for_ranges(1000, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
    CHECK(sum == 1000);
  }
}

TEST_CASE("thread pool: many calls from many threads") {
  ThreadPool pool(3);
  std::atomic<int64_t> total = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int call = 0; call < 500; ++call) {
        int64_t mine = 0;
        std::atomic<int64_t> sum = 0;
        pool.for_ranges(50 + call, 3, [&](int64_t begin, int64_t end) { sum += end - begin; });
        mine += sum;
        if (mine == 50 + call) total += 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(total == 2000);
}

TEST_CASE("thread pool: the default leaves cores to the devices' threads, now and when there are more of them") {
  if (std::getenv("ROUNDPIPE_OPTIM_THREADS") != nullptr) return;
  const int cores = physical_cores(usable_processors());
  const int nodes = static_cast<int>(roundpipe::memory::memory_nodes().size());
  ThreadPool::leave_cores(1);
  const auto before = ThreadPool::current();
  CHECK(before->threads() == default_threads(cores, 1, nodes));
  CHECK(ThreadPool::current() == before);
  ThreadPool::leave_cores(0);
  CHECK(ThreadPool::current() != before);
  CHECK(ThreadPool::current()->threads() == default_threads(cores, 0, nodes));
  ThreadPool::set_current(2, false);
  const auto chosen = ThreadPool::current();
  ThreadPool::leave_cores(1);
  CHECK(ThreadPool::current() == chosen);
}

TEST_CASE("thread pool: the current one can be replaced while it is used") {
  ThreadPool::set_current(2, false);
  const auto before = ThreadPool::current();
  ThreadPool::set_current(3, true);
  CHECK(before->threads() == 2);
  CHECK(ThreadPool::current()->threads() == 3);
  std::atomic<int64_t> sum = 0;
  before->for_ranges(100, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  CHECK(sum == 100);
}

TEST_CASE("thread pool: numbers that make no sense are refused") {
  for (const int threads : {0, -1, 5000}) {
    CHECK_THROWS_AS(ThreadPool pool(threads), std::invalid_argument);
    CHECK_THROWS_AS(ThreadPool::set_current(threads, false), std::invalid_argument);
  }
  ThreadPool pool(1);
  CHECK_THROWS_AS(pool.for_ranges(1, 0, [](int64_t, int64_t) {}), std::invalid_argument);
}
