#include <roundpipe/device/virtual/faults.h>

#include <algorithm>

namespace roundpipe::device {

void Faults::add(Fault fault) {
  const MutexLock lock(mutex_);
  fault.at += begun_;
  faults_.push_back(fault);
}

void Faults::release_hang() {
  const MutexLock lock(mutex_);
  std::erase_if(faults_, [](const Fault& fault) { return fault.kind == Fault::Kind::kHang; });
  hangs_ = false;
  changed_.notify_all();
}

bool Faults::hangs() const {
  const MutexLock lock(mutex_);
  return hangs_;
}

void Faults::begin_microbatch() {
  health_.check();
  double slow_ms = 0;
  bool error = false;
  {
    const MutexLock lock(mutex_);
    ++begun_;
    bool hang = false;
    for (const Fault& fault : faults_) {
      if (begun_ < fault.at) continue;
      hang |= fault.kind == Fault::Kind::kHang && begun_ == fault.at;
      error |= fault.kind == Fault::Kind::kError;
      if (fault.kind == Fault::Kind::kSlow) slow_ms += fault.slow_ms;
      if (fault.kind == Fault::Kind::kBits) wrong_bits_.store(true);
    }
    hangs_ = hang;
    while (hangs_) changed_.wait(mutex_);
  }
  if (slow_ms > 0) slow_.spend(slow_ms);
  if (error) {
    health_.fail(DeviceError(
        concat("[", device_, "] the device failed: every queue returns an error, as its fail= option asks")));
  }
  // It may have been given up while it hung.
  health_.check();
}

}  // namespace roundpipe::device
