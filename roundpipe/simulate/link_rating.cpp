#include <roundpipe/simulate/link_rating.h>

#include <algorithm>
#include <cmath>

#include <roundpipe/schedule/cut.h>
#include <roundpipe/schedule/moved_bytes.h>

namespace roundpipe::simulate {

using schedule::Cluster;
using schedule::Cut;
using schedule::CutStage;
using schedule::LayerCosts;
using schedule::PlanChoice;

namespace {

constexpr double kSmallBubble = 0.005;
constexpr int kClockedSteps = 9;
constexpr int kClockedForOne = 40;  // visits by the clock that take as long as one by the links

struct Steps {
  std::int64_t visits;
  int fewest, most;
};
constexpr Steps kCompared{2'000, 9, 25};
constexpr Steps kChosen{15'000, 13, 65};
constexpr Steps kReported{150'000, 25, 193};
constexpr Steps kPromised{300'000, 25, 193};  // as long as the commands simulate, for all but the largest plans
constexpr int kLimitSteps = 13;

const Steps& steps_for(Precision precision) {
  switch (precision) {
    case Precision::kCompare:
      return kCompared;
    case Precision::kChoose:
      return kChosen;
    case Precision::kReport:
      return kReported;
    default:
      return kPromised;
  }
}

std::vector<int> key_of(const Cut& cut) {
  std::vector<int> key{static_cast<int>(std::lround(cut.interleave * 1e6)), static_cast<int>(cut.forward.size())};
  for (const std::vector<CutStage>* stages : {&cut.forward, &cut.backward}) {
    for (const CutStage& stage : *stages)
      key.insert(key.end(), {stage.layers.first, stage.layers.last, stage.replicas});
  }
  return key;
}

std::int64_t visits_of(const PlanChoice& choice) {
  std::int64_t visits = 0;
  for (const schedule::Job& job : choice.recipe.jobs) visits += job.microbatches.size() + 1;
  return visits;
}

}  // namespace

Cluster with_hops(const LayerCosts& costs, Cluster cluster) {
  cluster.hop_latency_ms = schedule::hop_ms(costs, cluster);
  return cluster;
}

schedule::TimingRules through_host(schedule::TimingRules timing) {
  timing.hop_on_same_device = true;
  return timing;
}

std::vector<schedule::Plan> place_over_links(const schedule::Plan& recipe, const LayerCosts& costs,
                                             const Cluster& cluster, const LinkRules& rules, int steps) {
  schedule::Placer placer(recipe, costs, with_hops(costs, cluster), through_host(rules.timing));
  std::vector<schedule::Plan> plans;
  for (int step = 0; step < steps; ++step) plans.push_back(placer.next());
  return plans;
}

LinkRating::LinkRating(const LayerCosts& costs, const Cluster& cluster, const schedule::SearchOptions& options,
                       const LinkRules& rules, double effort_share)
    : costs_(costs),
      cluster_(cluster),
      options_(options),
      rules_(rules),
      hops_(with_hops(costs, cluster)),
      sums_(schedule::sums_of(costs, options.plan)),
      has_caps_(schedule::largest_room_bytes(cluster) > 0),
      effort_share_(effort_share) {
  for (const schedule::ClusterDevice& device : cluster.devices) speeds_ += device.speed;
}

PlanChoice LinkRating::choice_of(const Cut& cut) const {
  PlanChoice choice;
  choice.cut = cut;
  choice.recipe = schedule::to_recipe(cut, sums_, static_cast<int>(cluster_.devices.size()), options_.plan);
  choice.traffic = schedule::traffic_ratio(choice.recipe, sums_);
  return choice;
}

void LinkRating::score(PlanChoice& choice) const {
  schedule::score(choice, costs_, sums_, hops_, options_, repeated(kClockedSteps));
}

std::int64_t LinkRating::scored_visits(const PlanChoice& choice) const {
  return visits_of(choice) * repeated(kClockedSteps) / kClockedForOne;
}

int LinkRating::steps_of(std::int64_t visits, Precision precision) const {
  const Steps& of = steps_for(precision);
  const double share = precision == Precision::kPromise ? 1 : effort_share_;
  const double affordable = share * static_cast<double>(of.visits) / static_cast<double>(1 + visits);
  return repeated(std::clamp(static_cast<int>(affordable), of.fewest, of.most));
}

bool LinkRating::rate(PlanChoice& choice, Precision precision) {
  const auto [entry, is_new] = rated_.try_emplace(key_of(choice.cut));
  Rated& rated = entry->second;
  // Without bytes: the work, and whether each step fits. Only memory makes steps differ in that.
  if (is_new || choice.rating.work_ms == 0)
    choice.rating = schedule::rate(choice.recipe, costs_, hops_, options_.rules, has_caps_ ? kReported.most : 1);
  if (is_new) rated.fits = choice.rating.crowded == 0;
  if (!rated.fits) return false;
  const std::int64_t visits = visits_of(choice);
  const auto [known, is_missing] = rated.step_ms.try_emplace(precision);
  if (is_missing) {
    const int steps = steps_of(visits, precision);
    visits_ += visits * steps;
    // The pace of a few steps is a fit, which may come out faster than their work.
    known->second = std::max(simulated(choice, cluster_, rules_, steps).steady_step_ms, least_ms(choice));
  }
  choice.rating.step_ms = choice.score_ms = known->second;
  choice.rating.bubble = choice.rating.step_ms > 0 ? 1 - choice.rating.work_ms / speeds_ / choice.rating.step_ms : 0;
  return true;
}

double LinkRating::least_ms(const PlanChoice& choice) const {
  const double work_ms = choice.rating.work_ms / speeds_;
  if (!cluster_.on_host_cores) return work_ms;
  schedule::MovedBytes moved = schedule::moved_bytes(choice.recipe, costs_, sums_);
  moved.up -= static_cast<double>(kept_bytes(choice));
  return work_ms + schedule::time_in_turn_ms(moved, cluster_, rules_.update);
}

std::int64_t LinkRating::kept_bytes(const PlanChoice& choice) const {
  schedule::KeptWeights kept(costs_, cluster_);
  std::int64_t bytes = 0;
  if (!kept.any()) return bytes;
  const int steps = repeated(kLimitSteps);
  for (const schedule::Plan& plan : place_over_links(choice.recipe, costs_, cluster_, rules_, steps)) {
    bytes = 0;
    for (const schedule::Job& job : plan.jobs) {
      bytes += kept.kept_bytes(job.layers, job.device);
      kept.meet(job.layers, job.device);
    }
  }
  return bytes;
}

Timeline LinkRating::simulated(const PlanChoice& choice, const Cluster& cluster, const LinkRules& rules,
                               int steps) const {
  return simulate_links(place_over_links(choice.recipe, costs_, cluster_, rules, steps), costs_, cluster, rules)
      .timeline;
}

std::string LinkRating::limit_of(const PlanChoice& choice) const {
  if (choice.rating.bubble < kSmallBubble) return "compute";
  double shortest_ms = choice.rating.step_ms * (1 - kSmallBubble);
  if (cluster_.on_host_cores && shortest_ms < least_ms(choice)) return "the host's cores";
  std::string limit = rules_.timing.asynchronous ? "dependencies" : "fill and drain";
  const auto consider = [&](const char* name, const Cluster& cluster, const LinkRules& rules) {
    const double ms = simulated(choice, cluster, rules, repeated(kLimitSteps)).steady_step_ms;
    if (ms >= shortest_ms) return;
    shortest_ms = ms;
    limit = name;
  };
  Cluster up = cluster_, down = cluster_, host = cluster_;
  up.link_up_gb_per_s = down.link_down_gb_per_s = host.host_gb_per_s = 0;
  consider("links up", up, rules_);
  consider("links down", down, rules_);
  consider("host memory", host, rules_);
  LinkRules at_once = rules_;
  at_once.update = {};
  consider("optimizer", cluster_, at_once);
  return limit;
}

}  // namespace roundpipe::simulate
