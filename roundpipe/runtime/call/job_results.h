#pragma once

#include <compare>
#include <functional>
#include <optional>
#include <set>

#include <roundpipe/core/mutex.h>

namespace roundpipe::runtime {

// One result of a job: what it is, the layer (or the boundary before it) and the parameter block that it belongs to,
// and its microbatch or first gradient group.
struct JobResult {
  enum class Kind { kValues, kLosses, kInputGradients, kBuffers, kSum, kTiedGradient };
  Kind kind = Kind::kValues;
  int layer = 0;
  size_t block = 0;
  int part = 0;
  auto operator<=>(const JobResult&) const = default;
};

// What one job has delivered, over all attempts to run it. Every attempt computes the same bits, so each result counts
// once, whichever attempt delivers it first; a late attempt delivers nothing.
// Thread safety: any thread.
class JobResults {
 public:
  // Returns whether attempt number `attempt` may deliver `result`: it is the latest, the job is not over, and the
  // result has not been delivered. With true, the result counts as delivered.
  bool claim(int attempt, const JobResult& result);
  // The same, and runs `publish` before any other attempt can begin. `publish` must not wait.
  bool deliver(int attempt, const JobResult& result, const std::function<void()>& publish);

  // Runs `look`, which looks up on the host what the job reads, while no other attempt can begin and the job cannot
  // end: after that, it may be gone. Throws Cancelled if the attempt is not the latest, or the job is over. `look` must
  // not wait.
  void read(int attempt, const std::function<void()>& look);

  // Ends the job with the results of this attempt: `publish` writes the last of them. Returns false if the attempt is
  // not the latest, or the job is over.
  bool finish(int attempt, const std::function<void()>& publish);
  // Begins another attempt and returns its number; none if the job is over. It has to deliver new values of buffers
  // again: those of the attempt before go with it, since they are written only when the job ends.
  std::optional<int> begin_again();
  // Ends the job without the results that are missing. Returns false if it was over.
  bool give_up();

 private:
  Mutex mutex_;
  int attempt_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  bool over_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  std::set<JobResult> delivered_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace roundpipe::runtime
