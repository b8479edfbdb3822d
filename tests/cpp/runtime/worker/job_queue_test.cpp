#include <roundpipe/runtime/worker/job_queue.h>

#include <future>
#include <thread>

#include <doctest/doctest.h>

#include "support/model.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;
using roundpipe::MutexLock;
using roundpipe::device::EventPtr;
using roundpipe::device::make_event;

namespace job_queue_test {

std::shared_ptr<JobRun> job_of(const std::shared_ptr<ModelState>& model, double position, int slot = -1) {
  auto run = std::make_shared<JobRun>();
  run->call = std::make_shared<Call>(model, RunOptions(), CallTerms(), /*call_id=*/1, 0, 0);
  run->position = position;
  run->slot = slot;
  return run;
}

std::vector<double> positions(JobQueue& queue) {
  const MutexLock lock(queue.mutex());
  std::vector<double> found;
  for (const auto& job : queue.jobs()) found.push_back(job->position);
  return found;
}

void put(JobQueue& queue, std::shared_ptr<JobRun> run, double begun) {
  const MutexLock lock(queue.mutex());
  queue.enqueue(std::move(run), begun);
  queue.notify();
}

TEST_SUITE("job queue") {
  TEST_CASE("a job goes before those of later positions, but never before what has begun") {
    const auto model = make_model({linear_layer("a", 2)});
    JobQueue queue;
    put(queue, job_of(model, 4, /*slot=*/0), -1);
    put(queue, job_of(model, 6), -1);
    put(queue, job_of(model, 8), -1);
    put(queue, job_of(model, 7), -1);
    put(queue, job_of(model, 3), -1);
    CHECK(positions(queue) == std::vector<double>{4, 3, 6, 7, 8});
    put(queue, job_of(model, 5), /*begun=*/7);
    CHECK(positions(queue) == std::vector<double>{4, 3, 6, 7, 5, 8});
    double begun = -1;
    const MutexLock lock(queue.mutex());
    CHECK(queue.look(*model, begun));
    CHECK(begun == 4);
    CHECK_FALSE(queue.look(*make_model({linear_layer("b", 2)}), begun));
  }

  TEST_CASE("while the running job is alone, transfers of others find no memory") {
    const auto model = make_model({linear_layer("a", 2)});
    JobQueue queue;
    const auto running = job_of(model, 1, /*slot=*/0), next = job_of(model, 2, /*slot=*/1);
    put(queue, running, -1);
    put(queue, next, -1);
    REQUIRE(queue.wait_for_job() == running);
    const EventPtr done = make_event();
    queue.admit(*next, done, "device");
    const auto [job, begun] = queue.run_alone();
    CHECK(job == next);
    CHECK(begun == std::vector<EventPtr>{done});
    queue.admit(*running, make_event(), "device");
    CHECK_THROWS_AS(queue.admit(*next, make_event(), "device"), c10::OutOfMemoryError);
    {
      const MutexLock lock(queue.mutex());
      queue.pop();
    }
    queue.admit(*next, make_event(), "device");
  }

  TEST_CASE("a stopped queue hands out what it has, and ends when the last job is released") {
    const auto model = make_model({linear_layer("a", 2)});
    JobQueue queue;
    const auto only = job_of(model, 1, /*slot=*/0);
    put(queue, only, -1);
    queue.stop();
    CHECK(queue.wait_for_job() == only);
    {
      const MutexLock lock(queue.mutex());
      queue.pop();
    }
    std::future<bool> ended = std::async(std::launch::async, [&] { return queue.wait_for_job() == nullptr; });
    std::future<bool> waited = std::async(std::launch::async, [&] { return queue.wait_released(); });
    CHECK(ended.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
    {
      const MutexLock lock(queue.mutex());
      queue.released(only, /*over=*/true);
      CHECK(queue.unfinished().empty());
      queue.notify();
    }
    CHECK(ended.get());
    waited.get();
    CHECK_FALSE(queue.wait_released());
    CHECK(queue.drained());
  }

  TEST_CASE("nobody waits for a queue that has been left, as long as it has jobs") {
    const auto model = make_model({linear_layer("a", 2)});
    JobQueue queue;
    const auto only = job_of(model, 1, /*slot=*/0);
    put(queue, only, -1);
    CHECK(queue.wait_for_job() == only);
    CHECK_FALSE(queue.is_stuck());
    queue.leave();
    CHECK(queue.is_stuck());
    CHECK_FALSE(queue.drained());
    const MutexLock lock(queue.mutex());
    queue.pop();
    queue.released(only, /*over=*/false);
    CHECK(queue.unfinished() == std::vector<JobQueue::JobPtr>{only});
    queue.forget(only);
    CHECK(queue.unfinished().empty());
  }
}

}  // namespace job_queue_test
