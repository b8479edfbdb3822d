#include <roundpipe/device/health.h>

#include <utility>

namespace roundpipe::device {

void Health::fail(const DeviceError& error) {
  const MutexLock lock(mutex_);
  if (failure_) return;
  failure_ = std::make_exception_ptr(error);
  failed_.store(true);
  if (told_) told_();
}

std::exception_ptr Health::failure() const {
  const MutexLock lock(mutex_);
  return failure_;
}

void Health::on_failure(std::function<void()> told) {
  const MutexLock lock(mutex_);
  told_ = std::move(told);
  if (failure_ && told_) told_();
}

}  // namespace roundpipe::device
