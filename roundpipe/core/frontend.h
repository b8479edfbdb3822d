#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include <roundpipe/core/error.h>

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

  // Whether an error of the interpreter says that a device has no memory left; and whether it ends what the caller
  // does, as Ctrl+C, and is no failure of it.
  virtual bool is_out_of_memory(const std::exception_ptr& /*error*/) { return false; }
  virtual bool is_interrupt(const std::exception_ptr& /*error*/) { return false; }
  // An error in one line, with its kind if the interpreter has one.
  virtual std::string said(const std::exception& error);
  // Drops the values that an error of the interpreter keeps: those of the frames in which it was raised.
  virtual void release_values(const std::exception_ptr& /*error*/) {}
  // While the result lives, the interpreter's garbage stays, since what it frees would be counted. Null: nothing to do.
  virtual std::shared_ptr<void> without_collection() { return nullptr; }
  // How the user's language writes a text, and an option with its value (a number or a text), in advice.
  virtual std::string quoted(const std::string& text) { return text; }
  virtual std::string option(const std::string& name, const std::string& value) { return name + " = " + value; }
  // Drops the references of the interpreter to this thread's last error. Called first when a job has failed, because
  // torch leaves the error in the thread's state, too.
  virtual void clear_error() {}
  // Returns an out-of-memory error of the interpreter with `lines` as further lines of its message, or null for one of
  // the engine. Called on the caller's thread, while nothing of the model runs. May throw instead.
  virtual std::exception_ptr explain(const std::exception_ptr& /*error*/, const std::string& /*lines*/) {
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

// Frontend::warn, or stderr. On the caller's thread.
void tell_user(const std::string& notice);

// Sets the frontend; null restores the defaults. Call this once, before any thread of the engine starts. A previous
// frontend is kept alive, because threads may still use it.
void set_frontend(std::unique_ptr<Frontend> given);

}  // namespace roundpipe
