#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <string>
#include <utility>

#include <roundpipe/core/error.h>
#include <roundpipe/core/mutex.h>

namespace roundpipe::device {

// Whether a device works. It fails once and for good: a device that comes back is a new object.
// Thread safety: any thread.
class Health {
 public:
  // `device`: its name, for messages.
  explicit Health(std::string device) : device_(std::move(device)) {}

  const std::string& device() const { return device_; }
  // The device has failed with `error`, a DeviceError, and `on_failure` is told. Only the first error counts.
  void fail(const std::exception_ptr& error);
  void fail(const DeviceError& error) { fail(std::make_exception_ptr(error)); }
  // Null while the device works.
  std::exception_ptr failure() const;
  // Called after an error of code that used the device: finds out whether the device has failed, which may wait for the
  // work that was issued to it. Returns the failure, or null.
  std::exception_ptr failure_after_error();
  // `probe` asks the device to finish its work, and throws if it cannot. Null: a failure of the device is known as
  // such.
  void probe_with(std::function<void()> probe);
  bool failed() const { return failed_.load(); }
  // Throws the failure, if there is one.
  void check() const {
    if (failed()) std::rethrow_exception(failure());
  }

  // `told` is called once, when the device fails; at once if it has failed already. It must neither block nor throw.
  // Null: nobody is told from now on.
  void on_failure(std::function<void()> told);

 private:
  const std::string device_;
  std::atomic<bool> failed_{false};
  Mutex probe_mutex_;
  std::function<void()> probe_ ROUNDPIPE_GUARDED_BY(probe_mutex_);
  mutable Mutex mutex_;
  std::exception_ptr failure_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::function<void()> told_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace roundpipe::device
