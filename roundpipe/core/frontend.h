#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include <roundpipe/core/error.h>
#include <roundpipe/core/export.h>

namespace roundpipe {

// The services of the language that the engine is used from, for the engine's threads and callers. The defaults suit a
// C++ program. Thread safety: called on any thread, unless stated, and never with a lock of the engine held.
class ROUNDPIPE_API Frontend {
 public:
  virtual ~Frontend() = default;

  // Called when a thread starts that runs code of the interpreter's or drops its objects. The thread drops the result
  // when it ends. Until the engine has taken it, an error of code that a backward calls lives in the thread's
  // interpreter state, so that state must last.
  virtual std::shared_ptr<void> attach_thread() { return nullptr; }
  // Called about every 50 ms while a caller waits. May throw to abandon the wait.
  virtual void check_interrupt() {}
  // Called when nothing of call number `call` will run again, on the thread that drops the call last.
  virtual void call_over(uint64_t /*call*/) {}

  // Whether an error of the interpreter says that a device has no memory left.
  virtual bool is_out_of_memory(const std::exception_ptr& /*error*/) { return false; }
  // Drops the references of the interpreter to this thread's last error. Called first when a job has failed, because
  // torch leaves the error in the thread's state, too.
  virtual void clear_error() {}
  // Returns the out-of-memory error `error` in the form that the caller gets, or null for the engine's own message.
  // `where`: one sentence; `limit_bytes`: the device's cap, 0 = none known; `step`: see Call::keep_step. Called on the
  // caller's thread, while nothing of the model runs. May throw instead.
  virtual std::exception_ptr explain(const std::exception_ptr& /*error*/, const std::string& /*where*/,
                                     int64_t /*limit_bytes*/, const std::shared_ptr<const void>& /*step*/) {
    return nullptr;
  }
  // Warns the user, on the caller's thread. Returns false to leave the warning to torch. May throw if warnings are
  // errors.
  virtual bool warn(const std::string& /*notice*/) { return false; }
  // Throws the interpreter's form of an error of the engine. Used where the error crosses torch, which knows only its
  // own errors and the interpreter's.
  virtual void raise(const Error& /*error*/) {}
};

// The frontend that was set or, without one, the defaults.
Frontend& frontend();

// Sets the frontend; null restores the defaults. Call this once, before any thread of the engine starts. A previous
// frontend is kept alive, because threads may still use it.
void set_frontend(std::unique_ptr<Frontend> given);

}  // namespace roundpipe
