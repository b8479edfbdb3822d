#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <roundpipe/schedule/plan_choice.h>
#include <roundpipe/simulate/link_simulator.h>

namespace roundpipe::simulate {

// One plan for each of `steps` steps: `recipe` with devices. Values take the time of their transfers on idle links.
std::vector<schedule::Plan> place_over_links(const schedule::Plan& recipe, const schedule::LayerCosts& costs,
                                             const schedule::Cluster& cluster, const LinkRules& rules, int steps);

// How many asynchronous steps are simulated: few, to compare plans; more, to choose among the best; most, to report.
// Each is a number of simulated visits, so that long plans take no longer, within bounds; less effort means fewer, but
// for what is promised to a user.
enum class Precision { kCompare, kChoose, kReport, kPromise };

// Rates cuts by the simulation of links. Each cut is simulated once for each precision, by as many steps as its own
// length says: what a plan is rated does not depend on the plans beside it.
//
// `options`: those of a search without links. The references must outlive it.
class LinkRating {
 public:
  LinkRating(const schedule::LayerCosts& costs, const schedule::Cluster& cluster,
             const schedule::SearchOptions& options, const LinkRules& rules, double effort_share);

  const schedule::CostSums& sums() const { return sums_; }
  schedule::PlanChoice choice_of(const schedule::Cut& cut) const;
  // The clock's rating and score, which take a hundredth of the time, over few steps.
  void score(schedule::PlanChoice& choice) const;
  // The effort of score(), in simulated visits.
  std::int64_t scored_visits(const schedule::PlanChoice& choice) const;

  // Sets rating and score by the simulated links, and adds the visits that this took to visits(). Returns false if a
  // device has no room at some step.
  bool rate(schedule::PlanChoice& choice, Precision precision);
  std::int64_t visits() const { return visits_; }

  // What shortens the step most if it is made infinitely fast; else compute, or what the search was limited by. "the
  // host's cores" if they are busy all the time (see Cluster::on_host_cores).
  std::string limit_of(const schedule::PlanChoice& choice) const;

 private:
  struct Rated {
    bool fits = true;
    std::map<Precision, double> step_ms;
  };

  int steps_of(std::int64_t visits, Precision precision) const;
  Timeline simulated(const schedule::PlanChoice& choice, const schedule::Cluster& cluster, const LinkRules& rules,
                     int steps) const;
  // No step is shorter than what its devices compute or, if they are the host's cores, what those do in all.
  double least_ms(const schedule::PlanChoice& choice) const;
  // Of the frozen weights that a step's jobs read, what stays on devices; of the last of a few steps.
  std::int64_t kept_bytes(const schedule::PlanChoice& choice) const;
  // A synchronous step is simulated alone.
  int repeated(int steps) const { return rules_.timing.asynchronous ? steps : 1; }

  const schedule::LayerCosts& costs_;
  const schedule::Cluster& cluster_;
  const schedule::SearchOptions& options_;
  const LinkRules& rules_;
  const schedule::Cluster hops_;
  const schedule::CostSums sums_;
  const bool has_caps_;
  const double effort_share_;
  double speeds_ = 0;
  std::map<std::vector<int>, Rated> rated_;
  std::int64_t visits_ = 0;
};

// A cluster whose hop latency stands for the transfers of values, for the clocks without links.
schedule::Cluster with_hops(const schedule::LayerCosts& costs, schedule::Cluster cluster);
schedule::TimingRules through_host(schedule::TimingRules timing);

}  // namespace roundpipe::simulate
