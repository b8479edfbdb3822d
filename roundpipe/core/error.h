#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

// On a class that programs derive from, throw or catch: its type is one and the same in the library and in a program
// that hides its symbols (-fvisibility=hidden). Functions need no mark, since all of the engine's are exported: see
// cmake/exports.map.
#define ROUNDPIPE_API __attribute__((visibility("default")))

namespace roundpipe {

// Any failure that is not the caller's mistake. A caller's mistake is std::invalid_argument.
class ROUNDPIPE_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A device has failed: its queues return errors that do not go away, or it took longer than its watchdog allows.
class ROUNDPIPE_API DeviceError : public Error {
 public:
  using Error::Error;
};

// A device has computed or copied wrong bits without an error.
class ROUNDPIPE_API WrongBits : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

// The work was cancelled because something else failed or the user interrupted it. Never the root cause.
class ROUNDPIPE_API Cancelled : public Error {
 public:
  using Error::Error;
};

// Joins its arguments with operator<< into one string.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace roundpipe
