#pragma once

#include <vector>

#include <roundpipe/device/device.h>
#include <roundpipe/schedule/plan.h>

namespace roundpipe::runtime {

struct JobRun;

// When the device reached the backward of each layer of a segment, for one microbatch. Used by the thread that runs the
// backward and, before and after it, by the device's thread.
class BackwardClock {
 public:
  // `queue`, the device's compute queue, outlives this.
  BackwardClock(device::Queue& queue, schedule::Range layers)
      : queue_(queue), layers_(layers), reached_(static_cast<size_t>(layers.size())) {}

  // The backward of `layer` comes next. A layer can have several outputs: the first gradient that arrives counts.
  void reached(int layer);
  // Called after the backward of the job has been issued. Once the device has finished it, the call's
  // log gets each layer's time. The time of a layer that no gradient reached counts for the next layer above it.
  void over(const JobRun& run);

 private:
  device::Queue& queue_;
  const schedule::Range layers_;
  std::vector<device::EventPtr> reached_;
};

}  // namespace roundpipe::runtime
