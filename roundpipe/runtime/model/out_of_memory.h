#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include <roundpipe/core/error.h>

namespace roundpipe::runtime {

// Where a call ran out of device memory, after everything that keeps its bits had been tried.
struct FullDevice {
  std::string device;       // the device's name
  int64_t limit_bytes = 0;  // its cap; 0 = none known
  std::string model;
  uint64_t call = 0;   // its number among the model's calls
  std::string doing;   // "the backward of layer 3 (head)"
  int microbatch = 0;  // -1 = none in particular
  int microbatches = 1;
  std::string tried;  // what was tried to make it fit
};
// Describes all of it in one sentence.
std::string describe(const FullDevice& full);

// A step that a device may have no memory for.
class StepNote {
 public:
  virtual ~StepNote() = default;
  // What it takes, and what would fit, in lines for the error; empty if nothing is known. `cap_bytes`: of the device;
  // 0: unknown. Called on the caller's thread, while nothing of the model runs.
  virtual std::string explain(int64_t cap_bytes) const = 0;
};

// Runs `body`. An error of the engine is converted to the interpreter's form, if there is one.
void with_raised_errors(const std::function<void()>& body);

// Whether `error` says that a device is out of memory: c10::OutOfMemoryError, or an error that the frontend recognizes.
bool is_out_of_memory(const std::exception_ptr& error);

// Returns `error` with `full` described in it and what `step`, if there is one, says of it, if it says that a device is
// out of memory; any other error unchanged.
std::exception_ptr explained(const std::exception_ptr& error, const FullDevice& full,
                             const std::shared_ptr<const StepNote>& step);

// Warns the user, through the frontend or with torch's warnings.
void warn_user(const std::string& notice);

// Runs `body`. Returns its error if a device was out of memory, else null. Other errors pass.
std::exception_ptr out_of_memory_in(const std::function<void()>& body);

}  // namespace roundpipe::runtime
