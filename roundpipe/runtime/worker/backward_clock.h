#pragma once

#include <vector>

#include <roundpipe/device/device.h>
#include <roundpipe/schedule/range.h>

namespace roundpipe::runtime {

class Call;

// When the device came to the backward of each layer of a segment, for one microbatch. Used by the thread that makes
// the backward and, before and after it, by the device's.
class BackwardClock {
 public:
  // `queue`, the device's compute queue, outlives this.
  BackwardClock(device::Queue& queue, schedule::Range layers)
      : queue_(queue), layers_(layers), reached_(static_cast<size_t>(layers.size())) {}

  // The backward of `layer` comes next. A layer has several outputs: the first gradient that arrives counts.
  void reached(int layer);
  // After the backward has been issued: what each layer took is noted in LayerState::backward_ms once the device is
  // through. What a layer took that no gradient came to counts as the next upper one's.
  void over(Call& call);

 private:
  device::Queue& queue_;
  const schedule::Range layers_;
  std::vector<device::EventPtr> reached_;
};

}  // namespace roundpipe::runtime
