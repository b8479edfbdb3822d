#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class ProcessGroup;
}

namespace roundpipe::cluster {

// Hands a short message of every rank to every other one. Each rank makes the same exchanges, on one thread at a time.
//
// A message travels from rank to rank, not by a collective, so that a rank that does not answer is known by name. An
// exchange that fails, or is interrupted, closes the control: the ranks can no longer agree on anything.
class Control {
 public:
  // `group`: of gloo, used for nothing else. `timeout`: how long a rank may take to answer.
  Control(c10::intrusive_ptr<c10d::ProcessGroup> group, std::chrono::milliseconds timeout);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Of the group: the same on all ranks.
  std::string name() const;

  // Returns every rank's message, in the order of the ranks. What Frontend::check_interrupt throws ends the wait.
  // Throws Error if a rank did not answer, in this exchange or in an earlier one.
  std::vector<std::string> exchange(const std::string& message);

  // The number of one more model that the ranks agree about, from 1.
  int count_model() { return ++models_; }

 private:
  std::vector<std::string> send_all(const std::string& mine, const std::vector<size_t>& sizes);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::chrono::milliseconds timeout_;
  const int rank_;
  const int size_;
  int models_ = 0;
  std::string closed_;  // why; empty: it is open
};

}  // namespace roundpipe::cluster
