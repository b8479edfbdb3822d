// Copies that run beside the thread that issues them and fail in the middle of a transfer.
#include <roundpipe/transfer/link_scheduler.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <doctest/doctest.h>

using namespace roundpipe::transfer;
using roundpipe::device::EventPtr;
using roundpipe::device::make_event;
using roundpipe::device::Queue;
using roundpipe::device::QueueScope;

namespace {

// Copies on its own thread once it is let go, as an accelerator does, so that memory released too early shows as a read
// of freed memory. A copy that is not contiguous needs as much extra memory, of which there is a limited amount.
class AsynchronousQueue final : public Queue {
 public:
  ~AsynchronousQueue() override {
    let_go();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  std::unique_ptr<QueueScope> enter() override { return std::make_unique<Scope>(); }

  void copy(const at::Tensor& dst, const at::Tensor& src) override {
    const std::lock_guard lock(mutex_);
    if (asked_++ == fails_at_) throw std::runtime_error("bus error");
    const bool flat = dst.is_contiguous() && src.is_contiguous();
    TORCH_CHECK_WITH(OutOfMemoryError, flat || static_cast<int64_t>(src.nbytes()) <= room_bytes_, "no memory");
    // Not the tensors: the queue does not keep them alive until then.
    jobs_.push_back(
        [to = at::from_blob(dst.data_ptr(), dst.sizes(), dst.strides(), dst.options()),
         from = at::from_blob(src.data_ptr(), src.sizes(), src.strides(), src.options())] { to.copy_(from); });
    changed_.notify_all();
  }

  void signal(EventPtr event) override {
    const std::lock_guard lock(mutex_);
    jobs_.push_back([event = std::move(event)] { event->fire(); });
    changed_.notify_all();
  }

  void uses(const at::Tensor& /*tensor*/) override {}
  void emulate(double /*duration_ms*/) override {}

  void let_go() {
    const std::lock_guard lock(mutex_);
    held_ = false;
    changed_.notify_all();
  }
  void fail_copy(int64_t number) { fails_at_ = number; }
  void limit(int64_t room_bytes) { room_bytes_ = room_bytes; }
  int64_t asked() {
    const std::lock_guard lock(mutex_);
    return asked_;
  }
  // Blocks until `count` copies have been requested.
  void wait_asked(int64_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return asked_ >= count; });
  }

 private:
  class Scope final : public QueueScope {};

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !held_ && (stopping_ || !jobs_.empty()); });
      if (jobs_.empty()) return;
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = true;
  bool stopping_ = false;
  int64_t asked_ = 0;
  int64_t fails_at_ = -1;
  int64_t room_bytes_ = 0;
  std::deque<std::function<void()>> jobs_;
  std::thread thread_{[this] { run(); }};
};

using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;

Storage storage_of(const at::Tensor& tensor) { return Storage(tensor.storage().getWeakStorageImpl()); }

}  // namespace

TEST_CASE("copy faults: a transfer settles, and lets go, only when what was issued before the fault has arrived") {
  // The third of four pieces of one chunk; of a later chunk; the first of all.
  struct Case {
    int64_t chunk_bytes;
    int64_t fails_at;
  };
  for (const auto& [chunk_bytes, fails_at] : {Case{1'000'000, 2}, Case{400, 1}, Case{1'000'000, 0}}) {
    CAPTURE(fails_at);
    AsynchronousQueue queue;
    queue.fail_copy(fails_at);
    LinkScheduler link(queue, {.chunk_bytes = chunk_bytes});
    std::vector<at::Tensor> targets;
    std::vector<Storage> storages;
    std::vector<Piece> pieces;
    for (int i = 0; i < 4; ++i) {
      targets.push_back(at::zeros({100}));
      at::Tensor source = at::full({100}, i + 1.0);
      storages.push_back(storage_of(source));
      pieces.push_back({targets.back(), std::move(source)});
    }
    const EventPtr done = make_event(), settled = make_event();
    link.submit(
        {Priority::kWeight, {}, [moved = std::move(pieces)]() mutable { return std::move(moved); }, done, settled});
    queue.wait_asked(fails_at + 1);
    // Ends after the failed one, so the link has handled the failure by then.
    const EventPtr next = make_event(), begun = make_event();
    link.submit({Priority::kWeight,
                 {},
                 [begun] {
                   begun->fire();
                   return std::vector<Piece>();
                 },
                 next,
                 nullptr});
    if (chunk_bytes > 400) begun->wait();
    CHECK_FALSE(settled->complete());
    CHECK_FALSE(done->complete());
    for (int64_t i = 0; i < fails_at; ++i) CHECK_FALSE(storages[static_cast<size_t>(i)].expired());
    queue.let_go();
    settled->wait();
    CHECK_THROWS_WITH_AS(done->wait(), "bus error", std::runtime_error);
    next->wait();
    for (int64_t i = 0; i < 4; ++i) {
      CHECK(at::equal(targets[static_cast<size_t>(i)], at::full({100}, i < fails_at ? i + 1.0 : 0.0)));
    }
    for (const Storage& storage : storages) CHECK(storage.expired());
  }
}

TEST_CASE("copy faults: a strided transfer for which the device has no memory goes through in parts") {
  const at::Tensor numbers = at::arange(24 * 30 * 8, at::kFloat).view({24, 30, 8});
  // The slowest dimension last; every second element; a tensor of which only single elements are contiguous.
  const std::vector<at::Tensor> sources = {numbers.permute({2, 1, 0}), numbers.slice(2, 0, 8, 2),
                                           numbers.view({-1}).slice(0, 0, 5760, 3), numbers.permute({1, 0, 2}),
                                           numbers};
  for (const int64_t room_bytes : {1'000'000, 1000, 64, 0}) {
    for (const int64_t chunk_bytes : {0, 900, 64'000'000}) {
      CAPTURE(room_bytes);
      CAPTURE(chunk_bytes);
      AsynchronousQueue queue;
      queue.let_go();
      queue.limit(room_bytes);
      LinkScheduler link(queue, {.chunk_bytes = chunk_bytes});
      std::vector<at::Tensor> targets;
      std::vector<Piece> pieces;
      int64_t size_bytes = 0;
      for (const at::Tensor& source : sources) {
        targets.push_back(at::zeros(source.sizes()));
        pieces.push_back({targets.back(), source});
        size_bytes += static_cast<int64_t>(source.nbytes());
      }
      const EventPtr done = make_event(), settled = make_event();
      link.submit({Priority::kWeight, {}, [&] { return pieces; }, done, settled});
      done->wait();
      settled->wait();
      for (size_t i = 0; i < sources.size(); ++i) CHECK(at::equal(targets[i], sources[i]));
      CHECK(link.moved_bytes() == size_bytes);
      CHECK(link.use(Priority::kWeight).bytes == size_bytes);
    }
  }
}

TEST_CASE("copy faults: memory that runs out where none is asked for fails the transfer") {
  class Full final : public Queue {
   public:
    std::unique_ptr<QueueScope> enter() override { return std::make_unique<QueueScope>(); }
    void copy(const at::Tensor& /*dst*/, const at::Tensor& /*src*/) override {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "no memory");
    }
    void signal(EventPtr event) override { event->fire(); }
    void uses(const at::Tensor& /*tensor*/) override {}
    void emulate(double /*duration_ms*/) override {}
  } queue;
  LinkScheduler link(queue);
  for (const at::Tensor& source : {at::ones({6}), at::ones({4, 4}).t()}) {
    const EventPtr done = make_event(), settled = make_event();
    link.submit({Priority::kWeight,
                 {},
                 [&] { return std::vector<Piece>{{at::empty(source.sizes()), source}}; },
                 done,
                 settled});
    settled->wait();
    CHECK_THROWS_AS(done->wait(), c10::OutOfMemoryError);
  }
}

TEST_CASE("copy faults: what begin throws for want of host memory fails that transfer only") {
  AsynchronousQueue queue;
  queue.let_go();
  LinkScheduler link(queue);
  const EventPtr done = make_event(), settled = make_event(), other = make_event();
  link.submit({Priority::kWeight, {}, []() -> std::vector<Piece> { throw std::bad_alloc(); }, done, settled});
  link.submit({Priority::kWeight, {}, [] { return std::vector<Piece>(); }, other, nullptr});
  settled->wait();
  CHECK_THROWS_AS(done->wait(), std::bad_alloc);
  other->wait();
}

TEST_CASE("link: stops once, with everything done, and can still be asked") {
  AsynchronousQueue queue;
  queue.let_go();
  LinkScheduler link(queue);
  const EventPtr done = make_event();
  const at::Tensor target = at::zeros({10});
  link.submit({Priority::kWeight, {}, [&] { return std::vector<Piece>{{target, at::ones({10})}}; }, done, nullptr});
  link.stop();
  done->wait();
  link.stop();
  CHECK(link.moved_bytes() == 40);
}
