#pragma once

#include <atomic>
#include <cstdint>

#include <torch/csrc/utils/pybind.h>

namespace roundpipe::python {

// Holds the interpreter lock while it lives, as pybind11::gil_scoped_acquire does, and counts that it was taken.
//
// A thread that holds the lock already takes nothing, and nothing is counted. What the code under the lock does with it
// is not counted either: torch gives it back and takes it again around each of its own operations.
class InterpreterLock {
 public:
  InterpreterLock() : taken_(PyGILState_Check() == 0) {
    if (taken_) count_.fetch_add(1, std::memory_order_relaxed);
  }
  InterpreterLock(const InterpreterLock&) = delete;
  InterpreterLock& operator=(const InterpreterLock&) = delete;

  // By all threads since the extension was loaded. Any thread.
  static uint64_t acquisitions() { return count_.load(std::memory_order_relaxed); }

 private:
  static inline std::atomic<uint64_t> count_{0};

  const bool taken_;  // before the lock, whose taking it asks about
  const pybind11::gil_scoped_acquire lock_;
};

}  // namespace roundpipe::python
