#include "stream.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

namespace fake_card {
namespace {

constexpr int64_t kPooled = 32;  // streams of a pool; one pool for each of two priorities
constexpr int64_t kFirstNew = 1 + 2 * kPooled;
constexpr c10::DeviceIndex kMostCards = 16;

std::atomic<bool> ending{false};

size_t from_environment(const char* name, size_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

std::atomic<uint64_t> delay_seed{from_environment("CARD_DELAYS", 0)};

double now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

struct Card {
  std::mutex mutex;
  // Protected by mutex.
  std::vector<std::unique_ptr<Stream>> streams;
  int64_t next_pooled[2] = {0, 0};
  int64_t next_new = kFirstNew;
  std::string fault;

  std::atomic<bool> faulty{false};
  std::atomic<bool> context{false};
};

// Leaked on purpose: streams outlive whatever ends the process.
Card& card_of(c10::DeviceIndex card) {
  static auto* const cards = new std::array<Card, kMostCards>;
  TORCH_CHECK(card >= 0 && card < card_count(), "card: there is no card ", static_cast<int>(card));
  return (*cards)[static_cast<size_t>(card)];
}

const pid_t process = getpid();

// torch's libraries end their own state after this: no kernel may run by then.
struct Ending {
  Ending() { std::atexit(stop); }
  static void stop() {
    if (getpid() != process) return;  // a forked child has no streams
    ending.store(true);
    for (c10::DeviceIndex card = 0; card < card_count(); ++card) {
      std::vector<Stream*> streams;
      {
        const std::lock_guard lock(card_of(card).mutex);
        for (const auto& stream : card_of(card).streams) {
          if (stream) streams.push_back(stream.get());
        }
      }
      for (Stream* stream : streams) {
        stream->release();
        stream->mark()->wait();
      }
    }
  }
};
[[gnu::used]] const Ending at_the_end;

}  // namespace

void Mark::reach() {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
    time_ms_ = now_ms();
  }
  changed_.notify_all();
}

bool Mark::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

void Mark::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}

double Mark::time_ms() const {
  const std::lock_guard lock(mutex_);
  return time_ms_;
}

Stream::Stream(c10::DeviceIndex card, int64_t id) : card_(card), id_(id), thread_([this] { run(); }) {
  make_context(card);
  thread_.detach();
}

void Stream::queue(Task task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

void Stream::add(std::string what, std::function<void()> work) {
  check_fault(card_);
  queue({std::move(what), std::move(work), false});
}

void Stream::add_bookkeeping(std::function<void()> work) { queue({"", std::move(work), true}); }

MarkPtr Stream::mark() {
  auto mark = std::make_shared<Mark>();
  add_bookkeeping([mark] { mark->reach(); });
  return mark;
}

void Stream::wait_for(MarkPtr mark) {
  add_bookkeeping([mark = std::move(mark)] { mark->wait(); });
}

void Stream::synchronize() {
  mark()->wait();
  check_fault(card_);
}

bool Stream::idle() const {
  const std::lock_guard lock(mutex_);
  return tasks_.empty() && !busy_;
}

void Stream::hold() {
  auto gate = std::make_shared<Mark>();
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!gate_, "card: this stream is held already");
    gate_ = gate;
  }
  wait_for(std::move(gate));
}

void Stream::release() {
  MarkPtr gate;
  {
    const std::lock_guard lock(mutex_);
    gate.swap(gate_);
  }
  if (gate) gate->reach();
}

void Stream::delay() {
  const uint64_t seed = delay_seed.load();
  if (seed != delays_made_for_) {
    delays_made_for_ = seed;
    std::seed_seq numbers{seed, static_cast<uint64_t>(card_), static_cast<uint64_t>(id_)};
    random_.seed(numbers);
    // One stream in three is slow.
    mean_delay_us_ = random_() % 3 == 0 ? 150 : 15;
  }
  double delay_us = 1e3 * slow_ms_.load();
  if (seed != 0) {
    const double drawn = std::uniform_real_distribution<double>(1e-6, 1)(random_);
    if (random_() % 2 == 0) delay_us -= mean_delay_us_ * std::log(drawn);
  }
  if (delay_us > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(delay_us));
}

void Stream::run() {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // ns; delays would else be 50 us longer
  const at::NoGradGuard no_grad;
  while (true) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
    }
    if (task.also_when_faulty) {
      task.work();
    } else if (!has_fault(card_) && !ending.load()) {
      delay();
      try {
        task.work();
      } catch (const c10::Error& error) {
        set_fault(card_, c10::str(task.what, ": ", error.what_without_backtrace()));
      } catch (const std::exception& error) {
        set_fault(card_, c10::str(task.what, ": ", error.what()));
      }
    }
    task = {};
    const std::lock_guard lock(mutex_);
    busy_ = false;
  }
}

c10::DeviceIndex card_count() {
  static const auto count = static_cast<c10::DeviceIndex>(
      std::min<size_t>(from_environment("CARD_COUNT", 2), static_cast<size_t>(kMostCards)));
  return count;
}

size_t card_memory_bytes() {
  static const size_t bytes = from_environment("CARD_MEMORY_MIB", 4096) << 20;
  return bytes;
}

Stream& stream_of(c10::DeviceIndex card, int64_t id) {
  Card& owner = card_of(card);
  const std::lock_guard lock(owner.mutex);
  TORCH_CHECK(id >= 0 && id < owner.next_new, "card: there is no stream ", id);
  if (owner.streams.size() <= static_cast<size_t>(id)) owner.streams.resize(static_cast<size_t>(id) + 1);
  auto& stream = owner.streams[static_cast<size_t>(id)];
  if (!stream) stream = std::make_unique<Stream>(card, id);
  return *stream;
}

int64_t pooled_stream(c10::DeviceIndex card, bool high_priority) {
  Card& owner = card_of(card);
  const std::lock_guard lock(owner.mutex);
  const int64_t number = owner.next_pooled[high_priority ? 1 : 0]++ % kPooled;
  return 1 + number + (high_priority ? kPooled : 0);
}

int64_t new_stream(c10::DeviceIndex card) {
  Card& owner = card_of(card);
  const std::lock_guard lock(owner.mutex);
  return owner.next_new++;
}

void synchronize_card(c10::DeviceIndex card) {
  Card& owner = card_of(card);
  std::vector<MarkPtr> marks;
  {
    const std::lock_guard lock(owner.mutex);
    for (const auto& stream : owner.streams) {
      if (stream) marks.push_back(stream->mark());
    }
  }
  for (const MarkPtr& mark : marks) mark->wait();
  check_fault(card);
}

bool has_context(c10::DeviceIndex card) { return card_of(card).context.load(); }

void make_context(c10::DeviceIndex card) { card_of(card).context.store(true); }

void set_delays(uint64_t seed) { delay_seed.store(seed); }

void set_fault(c10::DeviceIndex card, const std::string& why) {
  Card& owner = card_of(card);
  const std::lock_guard lock(owner.mutex);
  if (owner.faulty.load()) return;
  owner.fault = why;
  owner.faulty.store(true);
}

void clear_fault(c10::DeviceIndex card) { card_of(card).faulty.store(false); }

bool has_fault(c10::DeviceIndex card) { return card_of(card).faulty.load(); }

void check_fault(c10::DeviceIndex card) {
  Card& owner = card_of(card);
  if (!owner.faulty.load()) return;
  std::string why;
  {
    const std::lock_guard lock(owner.mutex);
    why = owner.fault;
  }
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 1,
      c10::str("card error on card:", static_cast<int>(card), ": ", why, "; the card is lost to this process"));
}

}  // namespace fake_card
