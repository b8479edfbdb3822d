#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <tuple>

#include <roundpipe/core/mutex.h>

namespace roundpipe::runtime {

// The thread of this process that computes updates, one piece of work at a time. Among work that is ready, the order
// is: sums of gradients, then older steps, then norms before updates, then the lowest layer, which the next forward
// needs first.
// Thread safety: submit from any thread; does not block. The object lives as long as the process.
class UpdateThread {
 public:
  enum class Kind { kNorm, kUpdate };
  // Sums of gradients use step 0, which comes before all steps.
  struct Order {
    uint64_t step = 0;
    Kind kind = Kind::kUpdate;
    size_t layer = 0;
    auto operator<=>(const Order&) const = default;
  };
  // Work prepared for submission, so that submit() allocates nothing. Submitted once.
  using Work = std::multimap<Order, std::function<void()>>::node_type;

  static UpdateThread& instance();

  // `work` must handle its own errors: one that it throws is kept by the process, see device::escaped_error().
  static Work prepare(const Order& order, std::function<void()> work);

  // Returns false, with `work` unchanged, if the thread has been stopped.
  bool submit(Work& work) noexcept;

  // Blocks until all submitted work is done, including work submitted meanwhile. Not from the thread itself.
  void drain();
  // The same; afterwards, no more work is accepted.
  void stop();

 private:
  UpdateThread();
  void run();

  Mutex mutex_;
  Condition changed_;
  bool working_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  bool stopped_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  std::multimap<Order, std::function<void()>> ready_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace roundpipe::runtime
