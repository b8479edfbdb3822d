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
// Frozen weights draw a job to a device that keeps them: among equal devices, the one on which the job ends first wins,
// then the one that keeps the most of its weights, so that no job ends later for it.
class Placer {
 public:
  // `recipe`: a valid plan; its devices are not read. A job goes to a device that has memory for it, and for its
  // weights beside the device's job before it; a job of a single layer may do without the latter. If no device has room
  // beside its job, the weights have to come late, on any device that has memory for the job; see crowded(). Throws
  // std::invalid_argument if the arguments do not match, and for a job that fits no device.
  Placer(Plan recipe, const LayerCosts& costs, const Cluster& cluster, TimingRules rules);

  // Places the next step and returns its plan.
  Plan next();
  // Places the next step and returns the device of each job.
  std::vector<int> advance();

  // When the last placed step ends, counted from the start of the first.
  double end_ms() const { return end_ms_; }
  // How many of the jobs placed so far have weights that do not fit beside the job before them.
  int crowded() const { return crowded_; }
  const CostSums& sums() const { return progress_.sums(); }
  // Whether devices keep frozen weights, so that the first steps upload more than the later ones.
  bool keeps_weights() const { return progress_.kept().any(); }

 private:
  void place(int ahead);
  // -1 if there is none. `beside`: only devices that have room for the job's weights beside the job before.
  int choose_device(const Job& job, std::size_t number, int step, bool beside);
  bool fits_beside(std::size_t number, int device) const;
  // Whether `device` is the better one for a job of a `step`, of two that are alike.
  bool is_better(int device, int than, const Job& job, int step);

  struct Placed {
    std::vector<int> devices;  // of the jobs placed so far
    double end_ms = 0;
  };

  const Plan recipe_;
  Progress progress_;
  std::vector<std::vector<int>> classes_;  // devices grouped by speed and memory
  std::vector<std::vector<char>> fits_;    // [job][class]
  std::vector<std::int64_t> room_bytes_;   // of each device; empty if all are unlimited
  std::vector<std::int64_t> bytes_;        // of each job, without the weights of the next one
  std::vector<int> last_;                  // the job that each device was given last; -1 = none
  int crowded_ = 0;
  int step_ = 0;
  std::array<Placed, 2> placed_;  // this step and the next
  double end_ms_ = 0;
};

// The predicted performance of a recipe that runs step after step.
struct Rating {
  double step_ms = 0;  // synchronous: makespan of one step; asynchronous: from step end to step end in steady state
  double work_ms = 0;  // of a step, on one device of speed 1
  double bubble = 0;   // 1 - work / (sum of speeds * step)
  int crowded = 0;     // see Placer::crowded
};

// Milliseconds from step to step, fitted to the second half of the steps' end times. For a single step, its end.
// REQUIRES: at least one step.
double pace_ms(std::span<const double> ends_ms);

// Rates a recipe by the pace of the second half of `steps` steps (asynchronous), or by one step (synchronous).
Rating rate(const Plan& recipe, const LayerCosts& costs, const Cluster& cluster, TimingRules rules, int steps);

}  // namespace roundpipe::schedule
