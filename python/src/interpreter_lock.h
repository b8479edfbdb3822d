#pragma once

#include <atomic>
#include <cstdint>

#include <torch/csrc/utils/pybind.h>

#include <roundpipe/core/mutex.h>

namespace roundpipe::python {

// Holds the interpreter lock while it lives, as pybind11::gil_scoped_acquire does, and counts acquisitions.
//
// A thread that already holds the lock takes and counts nothing. Releases by code that runs under the lock are not
// counted either: torch releases the lock and takes it again around each of its own operations.
// What a wait takes to look for signals is not counted, since it says how long the wait was.
// No lock of the engine's is held: see require_no_locks.
// A fork waits until no thread is being given its interpreter state here.
class InterpreterLock {
 public:
  enum class Purpose { kWork, kSignals };

  explicit InterpreterLock(Purpose purpose = Purpose::kWork)
      : made_state_(make_state()), taken_(PyGILState_Check() == 0) {
    if (!taken_ || purpose == Purpose::kSignals) return;
    require_no_locks("Python");
    count_.fetch_add(1, std::memory_order_relaxed);
  }
  ~InterpreterLock() {
    // The reference that a new state begins with; pybind11 drops its own and with it the state.
    if (made_state_) lock_.dec_ref();
  }
  InterpreterLock(const InterpreterLock&) = delete;
  InterpreterLock& operator=(const InterpreterLock&) = delete;

  // Acquisitions by all threads since the extension was loaded. Any thread.
  static uint64_t acquisitions() { return count_.load(std::memory_order_relaxed); }

 private:
  // Gives the calling thread an interpreter state, without the lock. Returns false if it has one.
  static bool make_state();

  static inline std::atomic<uint64_t> count_{0};

  const bool made_state_;
  const bool taken_;  // declared before the lock: reads whether the lock is held already
  pybind11::gil_scoped_acquire lock_;
};

}  // namespace roundpipe::python
