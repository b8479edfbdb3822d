#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <tuple>

namespace roundpipe::runtime {

// The thread of this process that computes updates, one piece of work at a time. What is ready first by its order goes
// first: older steps, then norms before updates, then the lowest layer, which the next forward needs first.
// Thread safety: submit from any thread; does not block. Lives as long as the process.
class UpdateThread {
 public:
  enum class Kind { kNorm, kUpdate };
  struct Order {
    uint64_t step = 0;
    Kind kind = Kind::kUpdate;
    size_t layer = 0;
    auto operator<=>(const Order&) const = default;
  };

  static UpdateThread& instance();

  // `work` must not throw.
  void submit(const Order& order, std::function<void()> work);

  // Blocks until all that was submitted is done, and what was submitted meanwhile. Not from the thread itself.
  void drain();

 private:
  UpdateThread();
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  bool working_ = false;                               // protected by mutex_
  std::multimap<Order, std::function<void()>> ready_;  // protected by mutex_
};

}  // namespace roundpipe::runtime
