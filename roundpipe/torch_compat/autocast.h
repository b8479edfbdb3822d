#pragma once

#include <ATen/autocast_mode.h>

namespace roundpipe::torch_compat {

// Whether autocast chooses dtypes on this kind of device now, by the calling thread's state. False for a kind that
// autocast does not know.
inline bool autocasts(c10::DeviceType device) {
  return at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
}

}  // namespace roundpipe::torch_compat
