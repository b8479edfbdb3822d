#include <roundpipe/device/make_devices.h>
#include <roundpipe/transfer/link_scheduler.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <doctest/doctest.h>

using namespace roundpipe::transfer;
using roundpipe::device::Device;
using roundpipe::device::Event;
using roundpipe::device::EventPtr;
using roundpipe::device::fired_event;
using roundpipe::device::make_devices;
using roundpipe::device::make_event;
using roundpipe::device::parse_devices;
using roundpipe::device::Queue;
using roundpipe::device::QueueScope;

namespace {

constexpr int64_t kChunk_bytes = LinkOptions{}.chunk_bytes;

std::exception_ptr error_named(const char* what) { return std::make_exception_ptr(std::runtime_error(what)); }

// A queue that records its requests and completes chunks only when the test says so.
class HeldQueue final : public Queue {
 public:
  explicit HeldQueue(bool holding) : holding_(holding) {}

  std::unique_ptr<QueueScope> enter() override { return std::make_unique<QueueScopeOf>(); }

  void copy(const at::Tensor& dst, const at::Tensor& src) override {
    std::lock_guard lock(mutex_);
    copies_.push_back({src.storage().data(), static_cast<int64_t>(src.nbytes())});
    if (!failure_.empty()) throw std::runtime_error(failure_);
    changed_.notify_all();
  }

  void signal(EventPtr event) override {
    {
      std::lock_guard lock(mutex_);
      if (holding_) {
        held_.push_back(std::move(event));
        changed_.notify_all();
        return;
      }
    }
    event->fire();
  }

  void uses(const at::Tensor& /*tensor*/) override {}
  void emulate(double /*duration_ms*/) override {}

  struct Copy {
    const void* source;
    int64_t size_bytes;
  };

  std::vector<Copy> copies() {
    std::lock_guard lock(mutex_);
    return copies_;
  }

  // Blocks until `count` chunks are issued and not completed.
  void wait_held(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return held_.size() >= count; });
  }

  size_t held() {
    std::lock_guard lock(mutex_);
    return held_.size();
  }

  // Completes the oldest chunk; waits until there is one.
  void complete_one(std::exception_ptr error = nullptr) {
    EventPtr event;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !held_.empty(); });
      event = held_.front();
      held_.pop_front();
    }
    if (error) {
      event->fail(error);
    } else {
      event->fire();
    }
  }

  // From now on, chunks complete at once, including those that wait.
  void let_go() {
    std::deque<EventPtr> events;
    {
      std::lock_guard lock(mutex_);
      holding_ = false;
      events.swap(held_);
    }
    for (const EventPtr& event : events) event->fire();
  }

  void fail_copies(std::string what) {
    std::lock_guard lock(mutex_);
    failure_ = std::move(what);
  }

 private:
  class QueueScopeOf final : public QueueScope {};

  std::mutex mutex_;
  std::condition_variable changed_;
  // Protected by mutex_.
  bool holding_;
  std::string failure_;
  std::vector<Copy> copies_;
  std::deque<EventPtr> held_;
};

std::vector<Piece> piece_of(const at::Tensor& dst, const at::Tensor& src) { return {{dst, src}}; }

Transfer transfer_of(Priority priority, std::function<std::vector<Piece>()> begin, EventPtr done,
                     std::vector<EventPtr> after = {}) {
  Transfer transfer;
  transfer.priority = priority;
  transfer.after = std::move(after);
  transfer.begin = std::move(begin);
  transfer.done = std::move(done);
  transfer.settled = make_event();
  return transfer;
}

// A transfer whose begin() records its label.
Transfer labelled(Priority priority, int label, std::vector<int>& order, EventPtr after = nullptr) {
  return transfer_of(priority,
                     [label, &order] {
                       order.push_back(label);  // on the link's thread only
                       return piece_of(at::empty({4}), at::zeros({4}));
                     },
                     make_event(), {std::move(after)});
}

}  // namespace

TEST_CASE("link: classes in order of urgency, submission order within a class") {
  std::vector<int> order;
  std::vector<EventPtr> done;
  HeldQueue queue(false);
  LinkScheduler link(queue);
  // Holds the link's thread inside begin() while everything else is submitted.
  const EventPtr all_submitted = make_event();
  const EventPtr begun = make_event();
  link.submit(transfer_of(
      Priority::kParameterGradient,
      [&] {
        begun->fire();
        all_submitted->wait();
        return std::vector<Piece>();
      },
      make_event()));
  begun->wait();
  const auto submit = [&](Priority priority, int label) {
    Transfer transfer = labelled(priority, label, order);
    done.push_back(transfer.done);
    link.submit(std::move(transfer));
  };
  submit(Priority::kParameterGradient, 30);
  submit(Priority::kWeight, 20);
  submit(Priority::kWeight, 21);
  submit(Priority::kActivation, 0);
  submit(Priority::kBoundaryGradient, 10);
  submit(Priority::kActivation, 1);
  submit(Priority::kParameterGradient, 31);
  all_submitted->fire();
  for (const EventPtr& event : done) event->wait();
  CHECK(order == std::vector<int>{0, 1, 10, 20, 21, 30, 31});
}

TEST_CASE("link: nothing begins before what it comes after, and those that can go overtake it") {
  std::vector<int> order;
  HeldQueue queue(false);
  LinkScheduler link(queue);
  const EventPtr gate = make_event();
  Transfer gated = labelled(Priority::kActivation, 1, order, gate);
  Transfer open = labelled(Priority::kParameterGradient, 2, order, fired_event());
  Transfer last = labelled(Priority::kParameterGradient, 3, order, gated.done);
  const EventPtr gated_done = gated.done;
  const EventPtr open_done = open.done;
  const EventPtr last_done = last.done;
  link.submit(std::move(last));
  link.submit(std::move(gated));
  link.submit(std::move(open));
  open_done->wait();
  CHECK_FALSE(gated_done->complete());
  gate->fire();
  last_done->wait();
  CHECK(order == std::vector<int>{2, 1, 3});
}

TEST_CASE("link: a failed dependency fails the transfer, with the first error in list order, and it never begins") {
  std::vector<int> order;
  HeldQueue queue(false);
  LinkScheduler link(queue);
  const EventPtr first = make_event();
  const EventPtr second = make_event();
  Transfer transfer = labelled(Priority::kWeight, 1, order);
  transfer.after = {fired_event(), first, nullptr, second};
  Transfer follower = labelled(Priority::kWeight, 2, order, transfer.done);
  const EventPtr done = transfer.done;
  const EventPtr follower_done = follower.done;
  link.submit(std::move(transfer));
  link.submit(std::move(follower));
  second->fail(error_named("second"));
  CHECK_FALSE(done->complete());
  first->fail(error_named("first"));
  CHECK_THROWS_WITH_AS(done->wait(), "first", std::runtime_error);
  CHECK_THROWS_WITH_AS(follower_done->wait(), "first", std::runtime_error);
  CHECK(order.empty());
}

TEST_CASE("link: what begin or the copy throws fails that transfer only") {
  std::vector<int> order;
  HeldQueue queue(false);
  LinkScheduler link(queue);
  const EventPtr thrown = make_event();
  link.submit(
      transfer_of(Priority::kActivation, []() -> std::vector<Piece> { throw std::domain_error("no room"); }, thrown));
  CHECK_THROWS_WITH_AS(thrown->wait(), "no room", std::domain_error);

  queue.fail_copies("bus error");
  Transfer broken = labelled(Priority::kActivation, 1, order);
  const EventPtr broken_done = broken.done;
  link.submit(std::move(broken));
  CHECK_THROWS_WITH_AS(broken_done->wait(), "bus error", std::runtime_error);

  queue.fail_copies("");
  Transfer fine = labelled(Priority::kActivation, 2, order);
  const EventPtr fine_done = fine.done;
  link.submit(std::move(fine));
  CHECK_NOTHROW(fine_done->wait());
}

TEST_CASE("link: an error that the queue reports later fails the transfer") {
  HeldQueue queue(true);
  LinkScheduler link(queue);
  const EventPtr done = make_event();
  link.submit(transfer_of(Priority::kActivation, [] { return piece_of(at::empty({4}), at::zeros({4})); }, done));
  queue.complete_one(error_named("link down"));
  CHECK_THROWS_WITH_AS(done->wait(), "link down", std::runtime_error);
}

TEST_CASE("link: a transfer that was cancelled before it started is dropped") {
  std::vector<int> order;
  HeldQueue queue(false);
  LinkScheduler link(queue);
  const EventPtr gate = make_event();
  Transfer cancelled = labelled(Priority::kActivation, 1, order, gate);
  cancelled.done->fail(error_named("cancelled"));
  Transfer next = labelled(Priority::kActivation, 2, order, gate);
  const EventPtr next_done = next.done;
  link.submit(std::move(cancelled));
  link.submit(std::move(next));
  gate->fire();
  next_done->wait();
  CHECK(order == std::vector<int>{2});
}

TEST_CASE("link: large transfers go in chunks, few of them in flight, and an urgent one does not wait for the rest") {
  constexpr int64_t kChunks = 8;
  HeldQueue queue(true);
  LinkScheduler link(queue);
  // Never touched, so no memory is used.
  const at::Tensor layer = at::empty({kChunks * kChunk_bytes - 5}, at::kByte);
  const at::Tensor activation = at::empty({100}, at::kByte);
  const EventPtr layer_done = make_event();
  const EventPtr activation_done = make_event();
  link.submit(transfer_of(Priority::kWeight, [&] { return piece_of(layer, layer); }, layer_done));
  queue.wait_held(LinkScheduler::kInFlight);
  link.submit(transfer_of(Priority::kActivation, [&] { return piece_of(activation, activation); }, activation_done));
  for (int completed = 0; !activation_done->complete(); ++completed) {
    REQUIRE(completed < kChunks);
    CHECK(queue.held() <= LinkScheduler::kInFlight);
    queue.complete_one();
  }
  CHECK_FALSE(layer_done->complete());
  const std::vector<HeldQueue::Copy> copies = queue.copies();
  size_t place = 0;
  while (place < copies.size() && copies[place].source != activation.storage().data()) ++place;
  // Two chunks were in flight, and one more may have been picked already.
  CHECK(place <= LinkScheduler::kInFlight + 1);

  queue.let_go();
  layer_done->wait();
  int64_t layer_bytes = 0;
  for (const HeldQueue::Copy& copy : queue.copies()) {
    CHECK(copy.size_bytes <= kChunk_bytes);
    if (copy.source == layer.storage().data()) layer_bytes += copy.size_bytes;
  }
  CHECK(layer_bytes == layer.numel());
  CHECK(link.moved_bytes() == layer.numel() + activation.numel());
}

TEST_CASE("link: chunks of one transfer arrive complete, at every offset") {
  const auto devices = make_devices(parse_devices("virtual:1"));
  LinkScheduler link(devices[0]->upload());
  const at::Tensor source = at::arange(2 * kChunk_bytes / 8 + 3, at::kLong);
  const at::Tensor target = at::zeros_like(source);
  const EventPtr done = make_event();
  link.submit(transfer_of(Priority::kWeight, [&] { return piece_of(target, source); }, done));
  done->wait();
  CHECK(at::equal(target, source));
}

TEST_CASE("link: a transfer without bytes is done too") {
  HeldQueue queue(false);
  LinkScheduler link(queue);
  for (const bool piece : {false, true}) {
    const EventPtr done = make_event();
    link.submit(transfer_of(
        Priority::kWeight, [piece] { return piece ? piece_of(at::empty({0}), at::empty({0})) : std::vector<Piece>(); },
        done));
    done->wait();
  }
  CHECK(link.moved_bytes() == 0);
}

TEST_CASE("link: begin runs inside the queue's scope, so what it allocates is the device's") {
  const auto devices = make_devices(parse_devices("virtual:1,memory=1KiB"));
  LinkScheduler link(devices[0]->upload());
  const at::Tensor source = at::zeros({1024}, at::kByte);
  at::Tensor target;
  const EventPtr done = make_event();
  link.submit(transfer_of(
      Priority::kWeight,
      [&] {
        target = at::empty({1024}, at::kByte);
        return piece_of(target, source);
      },
      done));
  done->wait();
  CHECK(devices[0]->memory().current_bytes == 1024);
}

TEST_CASE("link: a transfer that finds no memory stands aside until there is some, and others go on") {
  const auto devices = make_devices(parse_devices("virtual:1,memory=1KiB"));
  LinkScheduler link(devices[0]->upload());
  const at::Tensor source = at::arange(128, at::kLong);
  at::Tensor holder, target;
  const auto into_target = [&] {
    target = at::empty({128}, at::kLong);
    return piece_of(target, source);
  };
  {
    const auto scope = devices[0]->compute().enter();
    holder = at::empty({1024}, at::kByte);
  }
  const EventPtr late = make_event(), other = make_event();
  link.submit(transfer_of(Priority::kActivation, into_target, late));
  CHECK_FALSE(link.wait(late));
  link.submit(transfer_of(Priority::kWeight, [] { return std::vector<Piece>{}; }, other));
  CHECK(link.wait(other));
  link.resume();
  CHECK_FALSE(link.wait(late));
  holder.reset();
  CHECK_FALSE(late->complete());
  link.resume();
  CHECK(link.wait(late));
  CHECK(at::equal(target, source));

  const EventPtr never = make_event();
  link.submit(
      transfer_of(Priority::kActivation, [&] { return piece_of(at::empty({1024}, at::kByte), source); }, never));
  CHECK_FALSE(link.wait(never));
  link.cancel_aside(never);
  CHECK_THROWS_AS(never->wait(), c10::OutOfMemoryError);

  const EventPtr left = make_event();
  {
    LinkScheduler ending(devices[0]->download());
    ending.submit(transfer_of(
        Priority::kActivation, []() -> std::vector<Piece> { TORCH_CHECK_WITH(OutOfMemoryError, false, "no memory"); },
        left));
  }
  CHECK_THROWS_AS(left->wait(), c10::OutOfMemoryError);
}

TEST_CASE("link: small pieces share a chunk, and use() tells what went by") {
  HeldQueue queue(true);
  LinkScheduler link(queue, {.chunk_bytes = 1000});
  std::vector<Piece> pieces;
  for (int i = 0; i < 10; ++i) pieces.push_back({at::empty({300}, at::kByte), at::empty({300}, at::kByte)});
  const EventPtr done = make_event();
  link.submit(transfer_of(Priority::kWeight, [&] { return pieces; }, done));
  int chunks = 0;
  while (!done->complete()) {
    queue.complete_one();
    ++chunks;
  }
  CHECK(chunks == 3);
  for (const HeldQueue::Copy& copy : queue.copies()) CHECK(copy.size_bytes <= 300);
  const LinkUse use = link.use(Priority::kWeight);
  CHECK(use.transfers == 1);
  CHECK(use.bytes == 3000);
  CHECK(use.queued_ms >= 0);
  CHECK(use.moving_ms >= 0);
  CHECK(link.use(Priority::kActivation).transfers == 0);
}

TEST_CASE("link: a piece has arrived when the chunk in which it ends has, and one that failed never does") {
  for (const bool fails : {false, true}) {
    HeldQueue queue(true);
    LinkScheduler link(queue, {.chunk_bytes = 1000});
    std::vector<Piece> pieces;
    for (const int64_t size : {300, 1500, 500, 100}) {
      pieces.push_back({at::empty({size}, at::kByte), at::empty({size}, at::kByte), make_event()});
    }
    const EventPtr done = make_event();
    link.submit(transfer_of(Priority::kWeight, [&] { return pieces; }, done));
    const auto arrived = [&] {
      int count = 0;
      for (const Piece& piece : pieces) count += piece.arrived->complete() ? 1 : 0;
      return count;
    };
    CHECK(arrived() == 0);
    queue.complete_one();  // 300 + 700
    CHECK(link.wait(done, pieces[0].arrived));
    CHECK(arrived() == 1);
    queue.complete_one(fails ? error_named("lost") : nullptr);  // 800 + 200
    CHECK(arrived() == (fails ? 1 : 2));
    if (!fails) queue.complete_one();
    queue.let_go();
    done->wait_complete();
    CHECK((done->error() != nullptr) == fails);
    CHECK(arrived() == (fails ? 1 : 4));
  }
}

TEST_CASE("link: first come first served, and moved whole, when asked to") {
  HeldQueue queue(true);
  LinkScheduler link(queue, {.chunk_bytes = 0, .first_come = true});
  const at::Tensor layer = at::empty({3 * kChunk_bytes}, at::kByte);
  const at::Tensor value = at::empty({10}, at::kByte);
  const EventPtr first = make_event(), second = make_event(), third = make_event();
  link.submit(transfer_of(Priority::kWeight, [&] { return piece_of(layer, layer); }, first));
  link.submit(transfer_of(Priority::kParameterGradient, [&] { return piece_of(layer, layer); }, second));
  link.submit(transfer_of(Priority::kActivation, [&] { return piece_of(value, value); }, third));
  queue.let_go();
  third->wait();
  const std::vector<HeldQueue::Copy> copies = queue.copies();
  REQUIRE(copies.size() == 3);
  CHECK(copies[0].size_bytes == layer.numel());
  CHECK(copies[1].size_bytes == layer.numel());
  CHECK(copies[2].size_bytes == value.numel());
}

TEST_CASE("link: tensors of a transfer live until their bytes are there, and not longer") {
  HeldQueue queue(true);
  LinkScheduler link(queue);
  at::Tensor source = at::zeros({4});
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(source.storage().getWeakStorageImpl());
  const EventPtr done = make_event();
  link.submit(transfer_of(
      Priority::kWeight, [moved = std::move(source)]() mutable { return piece_of(at::empty({4}), std::move(moved)); },
      done));
  queue.wait_held(1);
  done->fail(error_named("cancelled"));
  CHECK_FALSE(storage.expired());
  queue.complete_one();
}

TEST_CASE("link: settled fires when the link is through with a transfer, however it ended") {
  std::vector<int> order;
  HeldQueue queue(true);
  LinkScheduler link(queue);

  Transfer moved = labelled(Priority::kWeight, 1, order);
  const EventPtr moved_done = moved.done;
  const EventPtr moved_settled = moved.settled;
  link.submit(std::move(moved));
  queue.wait_held(1);
  CHECK_FALSE(moved_settled->complete());
  queue.complete_one();
  moved_settled->wait();
  CHECK(moved_done->complete());

  // Cancelled from outside while its bytes are still moving.
  Transfer cancelled = labelled(Priority::kWeight, 2, order);
  const EventPtr cancelled_settled = cancelled.settled;
  const EventPtr cancelled_done = cancelled.done;
  link.submit(std::move(cancelled));
  queue.wait_held(1);
  cancelled_done->fail(error_named("cancelled"));
  CHECK_FALSE(cancelled_settled->complete());
  queue.complete_one();
  cancelled_settled->wait();

  Transfer refused = labelled(Priority::kWeight, 3, order, fired_event());
  const EventPtr dependency = make_event();
  refused.after.push_back(dependency);
  const EventPtr refused_settled = refused.settled;
  link.submit(std::move(refused));
  CHECK_FALSE(refused_settled->complete());
  dependency->fail(error_named("dependency"));
  refused_settled->wait();

  const EventPtr thrown_done = make_event();
  Transfer thrown =
      transfer_of(Priority::kWeight, []() -> std::vector<Piece> { throw std::domain_error("no room"); }, thrown_done);
  const EventPtr thrown_settled = thrown.settled;
  link.submit(std::move(thrown));
  thrown_settled->wait();
  CHECK_THROWS_WITH_AS(thrown_done->wait(), "no room", std::domain_error);
  CHECK(order == std::vector<int>{1, 2});
}

TEST_CASE("link: the destructor finishes what was submitted") {
  std::vector<int> order;
  HeldQueue queue(false);
  std::vector<EventPtr> done;
  {
    LinkScheduler link(queue);
    for (int label = 0; label < 50; ++label) {
      Transfer transfer = labelled(Priority::kWeight, label, order);
      done.push_back(transfer.done);
      link.submit(std::move(transfer));
    }
  }
  CHECK(order.size() == 50);
  for (const EventPtr& event : done) CHECK(event->complete());
}

TEST_CASE("link: random transfers from many threads, up and down again, keep every byte") {
  constexpr int kThreads = 4;
  constexpr int kTransfers = 150;
  const auto devices = make_devices(parse_devices("virtual:2"));
  std::vector<std::unique_ptr<LinkScheduler>> up;
  std::vector<std::unique_ptr<LinkScheduler>> down;
  for (const auto& device : devices) {
    up.push_back(std::make_unique<LinkScheduler>(device->upload()));
    down.push_back(std::make_unique<LinkScheduler>(device->download()));
  }
  std::atomic<int64_t> asked_bytes{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t + 1));
      struct Trip {
        at::Tensor source;
        std::shared_ptr<at::Tensor> on_device = std::make_shared<at::Tensor>();
        at::Tensor back;
        EventPtr gate = make_event();
        EventPtr returned = make_event();
      };
      std::vector<Trip> trips(kTransfers);
      for (Trip& trip : trips) {
        const auto count = static_cast<int64_t>(random() % 3000);
        trip.source = at::arange(count, at::kInt) * static_cast<int64_t>(random() % 1000 + 1);
        if (random() % 4 == 0) trip.source = trip.source.slice(0, 0, count, 3);
        trip.back = at::zeros_like(trip.source);
        asked_bytes.fetch_add(2 * static_cast<int64_t>(trip.source.nbytes()));
        const size_t device = random() % devices.size();
        const EventPtr uploaded = make_event();
        const auto priority = [&] { return static_cast<Priority>(random() % 4); };
        down[device]->submit(transfer_of(
            priority(), [on_device = trip.on_device, back = trip.back] { return piece_of(back, *on_device); },
            trip.returned, {uploaded}));
        up[device]->submit(transfer_of(priority(),
                                       [on_device = trip.on_device, source = trip.source] {
                                         *on_device = at::empty_like(source);
                                         return piece_of(*on_device, source);
                                       },
                                       uploaded, {random() % 2 == 0 ? trip.gate : nullptr}));
      }
      for (const Trip& trip : trips) trip.gate->fire();
      for (const Trip& trip : trips) {
        trip.returned->wait();
        CHECK(at::equal(trip.back, trip.source));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int64_t moved_bytes = 0;
  for (size_t i = 0; i < devices.size(); ++i) moved_bytes += up[i]->moved_bytes() + down[i]->moved_bytes();
  CHECK(moved_bytes == asked_bytes.load());
}
