#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <roundpipe/core/mutex.h>

namespace roundpipe::cluster {

// Signs of life of the ranks of a group, in the group's store, and the error of the first collective that failed here.
// A thread, which ends with the object, writes this rank's signs and reads those of the others, so that they are known
// when the store is out of reach.
// Thread safety: any thread.
struct Heartbeat {
  // `store`: null: there are no signs, and no rank is named. `timeout`: the user's, for a collective.
  Heartbeat(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // Records that `what` failed with `reason`, and which ranks give no sign of life: blocks until some are known, for a
  // few of their signs' intervals at most. The first error counts, and is told to the other ranks.
  void fail(const std::string& what, const std::string& reason);
  // Throws Error with the recorded error, if there is one.
  void throw_failure();

 private:
  struct State;
  std::string find_cause() const;

  const std::shared_ptr<State> state_;
};

}  // namespace roundpipe::cluster
