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

// Runs `body`; an error of the engine leaves it in the interpreter's form, if there is one.
void with_raised_errors(const std::function<void()>& body);

// Whether `error` says that a device has no memory left: c10::OutOfMemoryError, or what the frontend knows.
bool is_out_of_memory(const std::exception_ptr& error);

// `error` as the frontend explains it, else, of a c10::OutOfMemoryError, one that says where.
std::exception_ptr explained(const std::exception_ptr& error, const FullDevice& full,
                             const std::shared_ptr<const void>& step);

// Tells the user, through the frontend or by torch's warnings.
void warn_user(const std::string& notice);

// Runs `body` and returns the error when the device had no memory left for it, else null. Other errors pass.
std::exception_ptr out_of_memory_in(const std::function<void()>& body);

}  // namespace roundpipe::runtime
