#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace roundpipe {

// What the backward of a stage recomputes at a time: the whole stage, whose graph it then holds, or one layer. Backward
// stages of one layer each are recomputed from their own inputs; in a longer one, forwards run once more (see
// MicrobatchRunner), so plans have one only where the host has no room for the inputs of every layer.
enum class RecomputeGrain { kStage, kLayer };

}  // namespace roundpipe

namespace roundpipe::schedule {

// Consecutive integers [first, last): the layers of a stage or the microbatches of a job.
struct Range {
  int first = 0;
  int last = 0;

  int size() const { return last - first; }
  bool contains(int value) const { return first <= value && value < last; }
  bool operator==(const Range&) const = default;
};

// "[first, last)", the form in errors and logs.
inline std::string to_string(Range range) {
  std::string text(1, '[');  // at -O3, g++ 12 warns of a false overlap in `"[" + string`
  text += std::to_string(range.first) + ", " + std::to_string(range.last);
  return text += ')';
}

// The work of a device on one visit to a stage. kFused: forward, loss and backward of the last layers.
enum class Phase { kForward, kFused, kBackward };

// "forward", "fused" or "backward".
const char* phase_name(Phase phase);

// The purpose of a plan.
enum class PlanMode {
  kInference,  // forward jobs only
  kTrain,      // all forward jobs, then the backward jobs; in between, the caller takes the loss of the whole batch
  kFused,      // the last stage computes the loss: forward jobs, fused jobs, backward jobs
};

// "inference", "train" or "fused".
const char* mode_name(PlanMode mode);

// One visit of one device to one stage. Microbatches run in ascending order.
struct Job {
  Phase phase = Phase::kForward;
  Range layers;
  Range microbatches;
  int device = 0;
  // Sort key across steps: a job of step s sorts at s + order. If every order is below 1, steps run one after another;
  // above 1, jobs of the next step may overtake this one. Each device runs its jobs in this order.
  double order = 0;

  bool operator==(const Job&) const = default;
};

// "backward, layers [2, 5), microbatches [0, 4), device 1".
std::string to_string(const Job& job);

// Every job of one step, by ascending Job::order. Each device runs its own jobs in that order.
struct Plan {
  int layers = 0;
  int microbatches = 0;
  int devices = 0;
  // Layers below this one are frozen and their inputs need no gradient, so they have no backward.
  int first_backward_layer = 0;
  std::vector<Job> jobs;

  // The distinct layer ranges of the forward jobs, in dispatch order.
  std::vector<Range> forward_stages() const;
  // The distinct layer ranges of the fused and backward jobs, in dispatch order.
  std::vector<Range> backward_stages() const;

  bool operator==(const Plan&) const = default;
};

// The layers cut into stages. Both lists are in execution order.
struct Stages {
  std::vector<Range> forward;
  // From the last layers down to first_backward_layer. In kFused, the front is the fused stage, and `forward` ends
  // where the fused stage starts. Empty in kInference.
  std::vector<Range> backward;

  bool operator==(const Stages&) const = default;
};

// Derives the mode from the plan's phases: kFused if any job is fused, kTrain if any is backward, else kInference.
PlanMode mode_of(const Plan& plan);

// Checks a plan. Throws std::invalid_argument, naming the first offending job, unless
// - the devices and the layer and microbatch ranges exist, and `mode` allows every phase;
// - each (layer, microbatch) goes forward exactly once and, except in kInference, backward exactly once from
//   first_backward_layer up; a fused job does both, and in kFused only fused jobs contain the last layer;
// - orders are in [0, 2) and ascend;
// - dispatch order is topological, so that devices that run their jobs in order cannot deadlock: a forward comes after
//   the forward of the layer below; a backward comes after the backward of the layer above and the forward of its own
//   layers; in kTrain, the backward of the last layer comes after the forward of every microbatch.
void validate(const Plan& plan, PlanMode mode);

// Cuts each backward job of several layers into jobs of one layer on the same device, the last layer first.
Plan with_single_backward_layers(Plan plan);

// Finds the job that runs a layer for a microbatch.
class JobIndex {
 public:
  // REQUIRES: validate(plan, mode_of(plan)) passes.
  explicit JobIndex(const Plan& plan);

  // The job that runs `layer` forward (or backward) for `microbatch`, or -1 if none does.
  int forward(int layer, int microbatch) const { return forward_[at(layer, microbatch)]; }
  int backward(int layer, int microbatch) const { return backward_[at(layer, microbatch)]; }

 private:
  std::size_t at(int layer, int microbatch) const {
    const auto row = static_cast<std::size_t>(layer), width = static_cast<std::size_t>(microbatches_);
    return row * width + static_cast<std::size_t>(microbatch);
  }

  int microbatches_;
  std::vector<int> forward_, backward_;
};

}  // namespace roundpipe::schedule
