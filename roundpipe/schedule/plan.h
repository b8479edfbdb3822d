#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <roundpipe/schedule/range.h>

namespace roundpipe::schedule {

// What a device does on one visit to a stage. Fused = forward, loss and backward of the last layers.
enum class Phase { kForward, kFused, kBackward };

// "forward", "fused" or "backward".
const char* phase_name(Phase phase);

// What a plan is for.
enum class PlanMode {
  kInference,  // forward jobs only
  kTrain,      // all forward jobs, then the backward jobs; the loss of the whole batch is taken outside, in between
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
  // Its place in the order of several steps is step + order, and every device takes its jobs in that order. Below 1 for
  // every job: step after step. Above, jobs of the next step with less go first.
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
  // Layers below are frozen and their inputs need no gradient: nothing goes backward through them.
  int first_backward_layer = 0;
  std::vector<Job> jobs;

  // Distinct layer ranges of the forward jobs, in dispatch order.
  std::vector<Range> forward_stages() const;
  // Distinct layer ranges of the fused and backward jobs, in dispatch order.
  std::vector<Range> backward_stages() const;

  bool operator==(const Plan&) const = default;
};

// The mode that a plan's phases say: fused if any job is fused, train if any is backward, otherwise inference.
PlanMode mode_of(const Plan& plan);

// Throws std::invalid_argument, naming the first job at fault, unless
// - devices, layer and microbatch ranges exist, and every phase belongs to `mode`;
// - each (layer, microbatch) goes forward exactly once, and backward exactly once from first_backward_layer up
//   (never in kInference); a fused job does both, and only the fused jobs reach the last layer in kFused;
// - orders are in [0, 2) and ascend;
// - dispatch order is topological, so that devices which take their jobs in order cannot deadlock: a forward stands
//   after the forward of the layer below, a backward after the backward of the layer above and the forward of its own
//   layers; in kTrain the first backward needs the outputs of every microbatch.
void validate(const Plan& plan, PlanMode mode);

// Which job computes what.
class JobIndex {
 public:
  // REQUIRES: validate(plan, mode_of(plan)) passes.
  explicit JobIndex(const Plan& plan);

  // The job that runs `layer` forward (or backward) for `microbatch`; -1 where there is none.
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
