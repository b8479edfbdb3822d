#pragma once

#include <array>
#include <span>
#include <vector>

#include <roundpipe/schedule/progress.h>

namespace roundpipe::schedule {

// Assigns devices to the jobs of consecutive steps. Deterministic, so each step's devices are known before it runs.
//
// Places jobs by ascending step + order, each on the device where the predicted clock ends it first. Among devices of
// equal speed and memory, the one that is free first wins, then the one with the lower number. Steps get different
// devices, because devices do not finish a step at the same time; several steps together load the devices evenly.
class Placer {
 public:
  // `recipe`: a valid plan; its devices are not read. A job never goes to a device whose memory is too small for it.
  // Throws std::invalid_argument if the arguments do not match, and for a job that fits no device.
  Placer(Plan recipe, const LayerCosts& costs, const Cluster& cluster, TimingRules rules);

  // Places the next step and returns its plan.
  Plan next();
  // Places the next step and returns the device of each job.
  std::vector<int> advance();

  // When the last placed step ends, counted from the start of the first.
  double end_ms() const { return end_ms_; }
  // The time of a step on one device of speed 1.
  double work_ms() const;

 private:
  void place(int ahead);
  int choose_device(const Job& job, std::size_t number, int step);

  struct Placed {
    std::vector<int> devices;  // of the jobs placed so far
    double end_ms = 0;
  };

  const Plan recipe_;
  Progress progress_;
  std::vector<std::vector<int>> classes_;  // devices grouped by speed and memory
  std::vector<std::vector<char>> fits_;    // [job][class]
  int step_ = 0;
  std::array<Placed, 2> placed_;  // this step and the next
  double end_ms_ = 0;
};

// The predicted performance of a recipe that runs step after step.
struct Rating {
  double step_ms = 0;  // synchronous: makespan of one step; asynchronous: from step end to step end in steady state
  double work_ms = 0;  // of a step, on one device of speed 1
  double bubble = 0;   // 1 - work / (sum of speeds * step)
};

// Milliseconds from step to step, fitted to the second half of the steps' end times. For a single step, its end.
// REQUIRES: at least one step.
double pace_ms(std::span<const double> ends_ms);

// Rates a recipe by the pace of the second half of `steps` steps (asynchronous), or by one step (synchronous).
Rating rate(const Plan& recipe, const LayerCosts& costs, const Cluster& cluster, TimingRules rules, int steps);

}  // namespace roundpipe::schedule
