#pragma once

#include <exception>
#include <functional>

namespace roundpipe::runtime {

// What another language's interpreter knows of errors that its code raised on a compute thread. Set once, before any
// worker; each may be null.
struct ErrorHooks {
  // Whether an error of the interpreter says that a device has no memory left.
  std::function<bool(const std::exception_ptr&)> is_out_of_memory;
  // Called when a job has failed, before anything else: torch leaves the error behind in the thread's state, too.
  std::function<void()> clear;
};
void set_error_hooks(ErrorHooks hooks);

// Lets go of what the interpreter holds of the last error of this thread.
void clear_error();

// Whether `error` says that a device has no memory left: c10::OutOfMemoryError, or what the hook knows.
bool is_out_of_memory(const std::exception_ptr& error);

// Runs `body` and returns the error when the device had no memory left for it, else null. Other errors pass.
std::exception_ptr out_of_memory_in(const std::function<void()>& body);

}  // namespace roundpipe::runtime
