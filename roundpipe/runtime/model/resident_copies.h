#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/mutex.h>
#include <roundpipe/device/event.h>

namespace roundpipe::runtime {

// A block of frozen weights on a device, kept there from job to job. Protected by the lock of the device's
// ResidentWeights, but for the sizes.
struct ResidentCopy {
  explicit ResidentCopy(int64_t size) : size_bytes(size) {}

  const int64_t size_bytes;
  at::Tensor bytes;               // uint8 [size_bytes]; undefined while the copy has no memory
  std::optional<uint64_t> holds;  // the fingerprint of what was uploaded last; none: unknown
  bool is_whole = false;          // that upload has ended well; known before `filled` fires
  bool is_doubtful = false;       // a job that failed may have written to it
  device::EventPtr filled;        // the last upload that was submitted has ended, well or not; null: there was none
  int users = 0;                  // jobs that were given its memory; freed or written only once there is none
  bool is_counted = false;        // among what the device keeps room for
  uint64_t last_wanted = 0;       // the device's submission that wanted it last
};
using ResidentCopyPtr = std::shared_ptr<ResidentCopy>;

// A model's resident copies on every worker. They go with the model.
// Thread safety: any thread.
class ResidentCopies {
 public:
  // The copy of a block on worker number `worker`; null if there is none.
  ResidentCopyPtr find(int worker, size_t block) const {
    const MutexLock lock(mutex_);
    const auto found = copies_.find({worker, block});
    return found != copies_.end() ? found->second : nullptr;
  }
  void put(int worker, size_t block, ResidentCopyPtr copy) {
    const MutexLock lock(mutex_);
    copies_[{worker, block}].swap(copy);
  }
  // Drops the copies on all workers but these.
  void keep(const std::vector<int>& workers);

 private:
  mutable Mutex mutex_;
  std::map<std::pair<int, size_t>, ResidentCopyPtr> copies_ ROUNDPIPE_GUARDED_BY(mutex_);  // [worker, block]
};

}  // namespace roundpipe::runtime
