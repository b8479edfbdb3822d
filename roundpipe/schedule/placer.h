#pragma once

#include <array>
#include <span>
#include <vector>

#include <roundpipe/schedule/progress.h>

namespace roundpipe::schedule {

// Gives the jobs of step after step their devices. Deterministic, so every step's devices are known before it runs.
//
// Jobs are placed by ascending step + order, each on the device where it ends first by the predicted clock: devices of
// equal speed and room are told apart by when they come free, then by number. Steps differ in their devices, since
// their ends do not line up; any number of steps together loads the devices evenly.
class Placer {
 public:
  // `recipe`: a valid plan whose devices are not read. Devices whose memory is too small for a job are not given it.
  // Throws std::invalid_argument for arguments that do not fit together, and for a job that fits no device.
  Placer(Plan recipe, const LayerCosts& costs, const Cluster& cluster, TimingRules rules);

  // The plan of the next step.
  Plan next();
  // The same, as the device of each job.
  std::vector<int> advance();

  // When the step that was placed last ends, counted from the start of the first.
  double end_ms() const { return end_ms_; }
  // What a step takes one device of speed 1.
  double work_ms() const;

 private:
  void place(int ahead);
  int choose_device(const Job& job, std::size_t number, int step);

  struct Placed {
    std::vector<int> devices;  // of the first jobs
    double end_ms = 0;
  };

  const Plan recipe_;
  Progress progress_;
  std::vector<std::vector<int>> classes_;  // devices by equal speed and room
  std::vector<std::vector<char>> fits_;    // [job][class]
  int step_ = 0;
  std::array<Placed, 2> placed_;  // this step and the next
  double end_ms_ = 0;
};

// How a recipe does when it is repeated.
struct Rating {
  double step_ms = 0;  // makespan of one step (synchronous), or from step end to step end in the steady state
  double work_ms = 0;  // of a step, on one device of speed 1
  double bubble = 0;   // 1 - work / (sum of speeds * step)
};

// Milliseconds from step to step, over the second half of the steps that end then; of a single one, its end.
// REQUIRES: at least one.
double pace_ms(std::span<const double> ends_ms);

// Asynchronous: the mean of the second half of `steps` steps. Synchronous: one step.
Rating rate(const Plan& recipe, const LayerCosts& costs, const Cluster& cluster, TimingRules rules, int steps);

}  // namespace roundpipe::schedule
