#include <roundpipe/device/health.h>

namespace roundpipe::device {

void Health::fail(const std::exception_ptr& error) {
  const MutexLock lock(mutex_);
  if (failure_) return;
  failure_ = error;
  failed_.store(true);
  if (told_) told_();
}

std::exception_ptr Health::failure() const {
  const MutexLock lock(mutex_);
  return failure_;
}

std::exception_ptr Health::failure_after_error() {
  {
    const MutexLock lock(probe_mutex_);
    if (probe_ && !failed()) {
      const std::string failed = concat("[", device_, "] the device failed, and its error does not go away");
      try {
        probe_();
      } catch (const std::exception& error) {
        fail(DeviceError(concat(failed, ": ", error.what())));
      } catch (...) {
        fail(DeviceError(failed));
      }
    }
  }
  return failure();
}

void Health::probe_with(std::function<void()> probe) {
  const MutexLock lock(probe_mutex_);
  probe_ = std::move(probe);
}

void Health::on_failure(std::function<void()> told) {
  const MutexLock lock(mutex_);
  told_ = std::move(told);
  if (failure_ && told_) told_();
}

}  // namespace roundpipe::device
