#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <roundpipe/core/mutex.h>

namespace roundpipe::cluster {

// Signs of life of the ranks of a group, in the group's store, and the error of the first collective that failed here.
// The thread that writes this rank's signs ends with the object.
// Thread safety: any thread.
struct Heartbeat {
  // `store`: null: there are no signs, and no rank is named. `timeout`: the user's, for a collective.
  Heartbeat(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // Records that `what` failed with `reason`, after looking which ranks are alive: blocks for some of their signs'
  // intervals. The first error counts, and is told to the other ranks.
  void fail(const std::string& what, const std::string& reason);
  // Throws Error with the recorded error, if there is one.
  void throw_failure();

 private:
  struct State;
  std::string find_cause() const;

  const int rank_;
  const int size_;
  const std::chrono::milliseconds interval_;
  const std::shared_ptr<State> state_;
};

}  // namespace roundpipe::cluster
