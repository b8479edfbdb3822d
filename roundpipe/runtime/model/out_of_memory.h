#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include <roundpipe/core/error.h>

namespace roundpipe::runtime {

// Where a call found no memory on a device, when all that keeps its bits had been tried.
struct FullDevice {
  std::string device;       // its name
  int64_t limit_bytes = 0;  // its cap; 0 = none known
  std::string model;
  uint64_t call = 0;   // its number among the model's calls
  std::string doing;   // "the backward of layer 3 (head)"
  int microbatch = 0;  // -1 = none in particular
  int microbatches = 1;
  std::string tried;  // what had been done to make it fit
};
// All of it as one sentence.
std::string describe(const FullDevice& full);

// What another language's interpreter knows of errors that its code raised on a compute thread, and how its users are
// told of things. Set once, before any worker; each may be null.
struct ErrorHooks {
  // Whether an error of the interpreter says that a device has no memory left.
  std::function<bool(const std::exception_ptr&)> is_out_of_memory;
  // Called when a job has failed, before anything else: torch leaves the error behind in the thread's state, too.
  std::function<void()> clear;
  // `error`, which `full` is about, as the caller shall get it. `step`: what the call was given to explain itself with,
  // see Call::keep_step. On the caller's thread, while nothing of the model runs. May throw instead.
  std::function<std::exception_ptr(const std::exception_ptr& error, const FullDevice& full,
                                   const std::shared_ptr<const void>& step)>
      explain;
  // Warns the user; on the caller's thread. Null: torch's own warnings. May throw, where warnings are errors.
  std::function<void(const std::string&)> warn;
  // Throws the interpreter's own form of an error of the engine, for where it passes through torch, which knows only
  // that one and its own.
  std::function<void(const Error&)> raise;
};
void set_error_hooks(ErrorHooks hooks);

// Lets go of what the interpreter holds of the last error of this thread.
void clear_error();

// Runs `body`; an error of the engine leaves it in the interpreter's form, if there is one.
void with_raised_errors(const std::function<void()>& body);

// Whether `error` says that a device has no memory left: c10::OutOfMemoryError, or what the hook knows.
bool is_out_of_memory(const std::exception_ptr& error);

// `error` with what is known of it: what the hook makes of it, else, of a c10::OutOfMemoryError, one that says where.
std::exception_ptr explained(const std::exception_ptr& error, const FullDevice& full,
                             const std::shared_ptr<const void>& step);

// Tells the user through the hook.
void warn_user(const std::string& notice);

// Runs `body` and returns the error when the device had no memory left for it, else null. Other errors pass.
std::exception_ptr out_of_memory_in(const std::function<void()>& body);

}  // namespace roundpipe::runtime
