#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include <roundpipe/core/error.h>

namespace roundpipe {

// The language that the engine is used from, where it is not C++: what it does for the engine's threads and callers.
// The defaults are those of a C++ program. Called on any thread; none of it is called with a lock of the engine held.
class Frontend {
 public:
  virtual ~Frontend() = default;

  // A compute thread begins; the result is dropped when the thread ends. Errors of code that a backward calls live in
  // the thread's interpreter state until the engine has them, so that state must not come and go.
  virtual std::shared_ptr<void> attach_thread() { return nullptr; }
  // Called about every 50 ms by waits of the caller's; may throw to abandon the wait.
  virtual void check_interrupt() {}
  // Nothing of call number `call` will run again. On the thread that drops it last.
  virtual void call_over(uint64_t /*call*/) {}

  // Whether an error of the interpreter says that a device has no memory left.
  virtual bool is_out_of_memory(const std::exception_ptr& /*error*/) { return false; }
  // Drops what the interpreter holds of the last error of this thread. Called when a job has failed, before anything
  // else: torch leaves the error behind in the thread's state, too.
  virtual void clear_error() {}
  // `error`, a lack of device memory, as the caller shall get it; null: the engine's own words. `where`: one sentence;
  // `limit_bytes`: the device's cap, 0 = none known; `step`: see Call::keep_step. On the caller's thread, while nothing
  // of the model runs. May throw instead.
  virtual std::exception_ptr explain(const std::exception_ptr& /*error*/, const std::string& /*where*/,
                                     int64_t /*limit_bytes*/, const std::shared_ptr<const void>& /*step*/) {
    return nullptr;
  }
  // Warns the user, on the caller's thread; false: torch's own warnings are to be used. May throw, where warnings are
  // errors.
  virtual bool warn(const std::string& /*notice*/) { return false; }
  // Throws the interpreter's own form of an error of the engine, for where it passes through torch, which knows only
  // that one and its own.
  virtual void raise(const Error& /*error*/) {}
};

// The one that has been set, else one with the defaults.
Frontend& frontend();

// Once, before any thread of the engine begins; null: the defaults again. The one before is kept, as threads may have
// it.
void set_frontend(std::unique_ptr<Frontend> given);

}  // namespace roundpipe
