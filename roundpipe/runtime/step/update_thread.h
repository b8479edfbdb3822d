#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <tuple>

namespace roundpipe::runtime {

// The thread of this process that computes updates, one piece of work at a time. What is ready first by its order goes
// first: sums of gradients, then older steps, then norms before updates, then the lowest layer, which the next forward
// needs first.
// Thread safety: submit from any thread; does not block. The object lives as long as the process.
class UpdateThread {
 public:
  enum class Kind { kNorm, kUpdate };
  // Of sums of gradients: step 0, which is before all steps.
  struct Order {
    uint64_t step = 0;
    Kind kind = Kind::kUpdate;
    size_t layer = 0;
    auto operator<=>(const Order&) const = default;
  };
  // Work that is ready to be submitted, once, so that this needs no memory.
  using Work = std::multimap<Order, std::function<void()>>::node_type;

  static UpdateThread& instance();

  // What `work` throws is kept by the process, see device::escaped_error(): it is to see to its own errors.
  static Work prepare(const Order& order, std::function<void()> work);

  // False, and `work` is as before, when the thread has been stopped.
  bool submit(Work& work) noexcept;

  // Blocks until all that was submitted is done, and what was submitted meanwhile. Not from the thread itself.
  void drain();
  // The same, and nothing is taken any more.
  void stop();

 private:
  UpdateThread();
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  // Protected by mutex_.
  bool working_ = false;
  bool stopped_ = false;
  std::multimap<Order, std::function<void()>> ready_;
};

}  // namespace roundpipe::runtime
