#include <roundpipe/simulate/link_search.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include <roundpipe/schedule/cut_moves.h>
#include <roundpipe/schedule/moved_bytes.h>

namespace roundpipe::simulate {

using schedule::Cluster;
using schedule::Cut;
using schedule::CutStage;
using schedule::kMostEffort;
using schedule::LayerCosts;
using schedule::PlanChoice;
using schedule::Range;
using schedule::SearchOptions;

namespace {

constexpr double kSmallBubble = 0.005;
constexpr int kSearched = 200;
// Of the effort, for the search without links; overlapping steps leave less to it, and more to simulate.
constexpr double kSyncEffort = 0.67, kAsyncEffort = 0.25;
constexpr std::size_t kOfEachKind = 3;  // of those, how many are simulated: fewer where each takes long
constexpr std::size_t kFewOfEachKind = 1, kFewEvenOfEachKind = 2;
constexpr std::array kTrafficKinds = {1.0, 1.25, 2.0};
constexpr int kEachNumber = 12, kFewNumbers = 4;  // up to so many stages, each number is tried
constexpr std::size_t kRefinedOfEachKind = 2;
constexpr std::size_t kNarrow = 24;
constexpr std::size_t kFinal = 6;
constexpr std::size_t kReported = 2;
constexpr double kNearTie = 0.002;  // plans that may turn out to be ties when they are simulated for longer
// Effort, in simulated visits of a microbatch to a stage; one takes about 3 us.
constexpr std::int64_t kSearchedVisits = 60'000, kEvenVisits = 200'000;
constexpr std::int64_t kPoolVisits = 150'000;
constexpr std::int64_t kRefineVisits = 40'000;  // for each start
constexpr std::int64_t kAllRefineVisits = 150'000;
constexpr std::size_t kCrossed = 6;
constexpr std::int64_t kCrossVisits = 60'000;
constexpr std::ptrdiff_t kPolished = 2;
constexpr std::int64_t kPolishVisits = 60'000;  // for each
constexpr int kMostTries = 4000;
constexpr int kClockedForOne = 40;    // visits by the clock that take as long as one by the links
constexpr double kPromising = 1.005;  // a plan whose clocked step is longer than this is not simulated
constexpr std::int64_t kFinalVisits = 100'000;
constexpr int kFewestSteps = 5, kMostSteps = 25;         // to compare plans
constexpr int kFewestFinalSteps = 13, kFinalSteps = 49;  // to rate the last few
constexpr std::int64_t kReportVisits = 300'000;
constexpr int kReportSteps = 193;  // of those that are returned
constexpr int kClockedSteps = 9;
constexpr double kMostInterleave = 1.5;

// A cut of even stages that visits each layer before the fused ones once in each direction. Single layers may come
// before the even stages of the forward and after those of the backward, which fills and drains the devices sooner.
struct Even {
  int forward = 0, backward = 0;  // even stages
  int first = 0, last = 0;        // single layers, first in the forward and last in the backward
  int fused = 1;                  // layers of the fused stage
  int head = 1;                   // devices that share it
  int interleave_percent = 100;

  auto operator<=>(const Even&) const = default;
};

// Whether the head is shared, steps overlap and more than the head is fused. Each kind is searched alike, however many
// kinds are allowed.
using Kind = std::tuple<bool, bool, bool>;
Kind kind_of(const Even& even) { return {even.head > 1, even.interleave_percent > 100, even.fused > 1}; }

struct Candidate {
  PlanChoice choice;
  std::optional<Even> even;
};

Cluster with_hops(const LayerCosts& costs, Cluster cluster) {
  cluster.hop_latency_ms = schedule::hop_ms(costs, cluster);
  return cluster;
}

schedule::TimingRules through_host(schedule::TimingRules timing) {
  timing.hop_on_same_device = true;
  return timing;
}

// For the searches and clocks without a simulation of links.
SearchOptions without_links(SearchOptions options, const LinkRules& rules) {
  options.rules = through_host(rules.timing);
  options.update_gb_per_s = rules.update_gb_per_s;
  options.effort =
      std::llround((rules.timing.asynchronous ? kAsyncEffort : kSyncEffort) * static_cast<double>(options.effort));
  options.finalists = kSearched;
  options.starts.clear();
  return options;
}

class LinkSearch {
 public:
  LinkSearch(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options, const LinkRules& rules)
      : costs_(costs),
        cluster_(cluster),
        hops_(with_hops(costs, cluster)),
        options_(without_links(options, rules)),
        rules_(rules),
        starts_(options.starts),
        sums_(costs, options_.plan.first_backward_layer),
        devices_(static_cast<int>(cluster.devices.size())),
        room_bytes_(schedule::largest_room_bytes(cluster)),
        moves_(options_, sums_, devices_),
        effort_share_(std::sqrt(static_cast<double>(options.effort) / static_cast<double>(kMostEffort))) {}

  std::vector<PlanChoice> run() {
    add_searched();
    add_known();
    add_even();
    simulate_all(steps_for(kPoolVisits, kFewestSteps, kMostSteps));
    narrow();
    simulate_all(steps_for(kPoolVisits, kFewestSteps, kMostSteps));
    refine();
    cross();
    polish();
    std::vector<PlanChoice> choices;
    for (Candidate& candidate : pool_) {
      if (choices.size() < kFinal) choices.push_back(std::move(candidate.choice));
    }
    if (rules_.timing.asynchronous) simulate_all(choices, kFinalVisits, kFewestFinalSteps, kFinalSteps);
    // Ties are settled once, by the longest simulation: settled twice, they would add up.
    const auto is_behind = [&](const PlanChoice& choice) {
      return choice.score_ms > choices.front().score_ms * (1 + kNearTie);
    };
    const auto near = std::ranges::find_if(choices, is_behind) - choices.begin();
    choices.resize(std::min(choices.size(), std::max<std::size_t>(kReported, static_cast<std::size_t>(near))));
    simulate_all(choices, kReportVisits, effort_share_ < 1 ? kFewestFinalSteps : kFinalSteps, kReportSteps);
    schedule::settle_ties(choices, sums_);
    choices.resize(std::min(choices.size(), kReported));
    choices.front().limit = limit_of(choices.front());
    return choices;
  }

 private:
  bool has_fused() const { return moves_.has_fused(); }

  void add(PlanChoice choice, std::optional<Even> even = {}) {
    for (Candidate& known : pool_) {
      if (known.choice.cut != choice.cut) continue;
      if (even) known.even = even;
      return;
    }
    pool_.push_back({std::move(choice), even});
  }

  PlanChoice choice_of(const Cut& cut) const {
    PlanChoice choice;
    choice.cut = cut;
    choice.recipe = schedule::to_recipe(cut, sums_, devices_, options_.plan);
    choice.traffic = schedule::traffic_ratio(choice.recipe, sums_);
    return choice;
  }

  // Sets the choice's rating, without bytes, and says whether it is possible in every step and moves little enough.
  bool is_possible(PlanChoice& choice) const {
    if (options_.max_traffic > 0 && choice.traffic > options_.max_traffic) return false;
    // Only memory makes steps differ in whether they are possible.
    choice.rating = schedule::rate(choice.recipe, costs_, hops_, options_.rules, room_bytes_ > 0 ? kReportSteps : 1);
    return choice.rating.crowded == 0;
  }

  // The plans of each kind that the clock and the bytes rate best: transfers may change their order.
  void add_searched() {
    std::map<std::tuple<std::ptrdiff_t, bool, bool, bool>, std::size_t> taken;
    std::int64_t visits = 0;
    for (PlanChoice& choice : schedule::search(costs_, hops_, options_)) {
      const auto kind = std::ranges::lower_bound(kTrafficKinds, choice.traffic - 1e-9) - kTrafficKinds.begin();
      const std::vector<CutStage>& backward = choice.cut.backward;
      const bool shared = std::ranges::any_of(backward, [](const CutStage& stage) { return stage.replicas > 1; });
      const bool keeps_more = has_fused() && backward.front().layers.size() > 1;
      std::size_t& of_kind = taken[{kind, choice.cut.interleave > 1, shared, keeps_more}];
      const bool few = visits > kSearchedVisits;
      if (of_kind >= (few ? kFewOfEachKind : kOfEachKind) || !is_possible(choice)) continue;
      ++of_kind;
      visits += visits_of(choice) * repeated(kFewestSteps);
      add(std::move(choice));
    }
  }

  // The greedy cut, and the caller's.
  void add_known() {
    const Cut greedy = schedule::to_cut(schedule::greedy_stages(costs_, devices_, options_.plan));
    std::vector<Cut> known{schedule::limited_cut(greedy, sums_.layers(), options_)};
    std::ranges::copy_if(starts_, std::back_inserter(known), [this](const Cut& cut) { return moves_.allows(cut); });
    for (const Cut& cut : known) {
      if (!fits(cut)) continue;
      PlanChoice choice = choice_of(cut);
      if (is_possible(choice)) add(std::move(choice));
    }
  }

  bool fits(const Cut& cut) const {
    const auto fit = [&](bool backward) {
      return [this, backward](const CutStage& stage) { return sums_.fits(stage.layers, backward, room_bytes_); };
    };
    return std::ranges::all_of(cut.forward, fit(false)) && std::ranges::all_of(cut.backward, fit(true));
  }

  // The cuts into `stages` stages of even cost; nothing if there is none.
  std::vector<Range> stages_of(Range layers, bool backward, int stages) {
    const auto key = std::make_tuple(backward, layers.first, layers.last);
    auto found = tables_.find(key);
    if (found == tables_.end())
      found = tables_.emplace(key, schedule::partitions_of(sums_, layers, backward, room_bytes_)).first;
    return found->second.cut(stages);
  }

  int end(int fused) const { return has_fused() ? sums_.layers() - fused : sums_.layers(); }
  int lowest(int fused) const { return std::min(options_.plan.first_backward_layer, end(fused)); }
  int backward_layers(int fused) const { return moves_.trains() ? end(fused) - lowest(fused) : 0; }
  int most_heads(int fused) const {
    if (!has_fused() || !options_.replicas) return 1;
    return moves_.most_shared({end(fused), sums_.layers()}, /*backward=*/true);
  }

  std::optional<Cut> cut_of(const Even& even) {
    const int percent = even.interleave_percent;
    if (percent < 100 || percent > 100 * kMostInterleave || (percent > 100 && !moves_.overlaps())) return std::nullopt;
    const int fused = even.fused, end = this->end(fused), lowest = this->lowest(fused), back = backward_layers(fused);
    if (fused < 1 || (fused > 1 && fused > options_.max_fused_layers) || end < 0) return std::nullopt;
    if (even.head < 1 || even.head > most_heads(fused)) return std::nullopt;
    if (even.first < 0 || even.forward < 0 || even.first + even.forward > end) return std::nullopt;
    if (even.last < 0 || even.backward < 0 || even.last + even.backward > back) return std::nullopt;
    if ((even.forward > 0) != (end > 0) || (even.backward > 0) != (back > 0)) return std::nullopt;
    Cut cut;
    cut.interleave = percent / 100.0;
    if (even.forward > 0) {
      for (int l = 0; l < even.first; ++l) cut.forward.push_back({{l, l + 1}, 1});
      const std::vector<Range> stages = stages_of({even.first, end}, false, even.forward);
      if (stages.empty()) return std::nullopt;
      for (const Range& layers : stages) cut.forward.push_back({layers, 1});
    }
    if (has_fused()) cut.backward.push_back({{end, sums_.layers()}, even.head});
    if (!fits(cut)) return std::nullopt;
    if (even.backward > 0) {
      const std::vector<Range> stages = stages_of({lowest + even.last, end}, true, even.backward);
      if (stages.empty()) return std::nullopt;
      for (auto layers = stages.rbegin(); layers != stages.rend(); ++layers) cut.backward.push_back({*layers, 1});
      for (int l = lowest + even.last; l-- > lowest;) cut.backward.push_back({{l, l + 1}, 1});
    }
    return cut;
  }

  std::vector<int> stage_numbers(int layers, bool few) const {
    std::set<int> numbers;
    if (!few) numbers.insert(layers);
    for (int number = 1; number <= std::min(layers, few ? kFewNumbers : kEachNumber); ++number) numbers.insert(number);
    for (const int rounds : {1, 2, 3, 4, 6, 8, 12}) {
      if (!few || rounds < 3) numbers.insert(std::min(layers, rounds * devices_));
    }
    return {numbers.begin(), numbers.end()};
  }

  // One layer, and some larger parts of those that may be fused.
  std::vector<int> fused_sizes() const {
    std::set<int> sizes{1};
    const int most = has_fused() ? std::min(options_.max_fused_layers, sums_.layers()) : 1;
    for (const int share : {10, 6, 4, 3, 2}) sizes.insert(std::max(1, most / share));
    sizes.insert(std::max(1, 3 * most / 4));
    return {sizes.begin(), sizes.end()};
  }

  // Synchronous steps fill and drain the devices each time.
  std::set<int> singles(int fused) const {
    if (rules_.timing.asynchronous || fused > 1) return {0};
    return {0, devices_ / 2, devices_};
  }

  // The even cuts with so many fused layers, rated by the clock.
  void add_scored(int fused, std::vector<Candidate>& candidates) {
    const bool few = fused > 1;
    for (const int forward : stage_numbers(end(fused), few)) {
      for (const int backward : stage_numbers(backward_layers(fused), few)) {
        for (const int head : std::set{1, most_heads(fused)}) {
          for (const int percent : {100, 115, 130}) {
            for (const int first : singles(fused))
              for (const int last : singles(fused))
                add_scored({forward, backward, first, last, fused, head, percent}, candidates);
          }
        }
      }
    }
  }

  void add_scored(const Even& even, std::vector<Candidate>& candidates) {
    const std::optional<Cut> cut = cut_of(even);
    if (!cut) return;
    PlanChoice choice = choice_of(*cut);
    schedule::score(choice, costs_, sums_, hops_, options_, repeated(kClockedSteps));
    if (choice.rating.crowded == 0) candidates.push_back({std::move(choice), even});
  }

  // Even cuts: those of each kind that the clock and the bytes rate best.
  void add_even() {
    std::vector<Candidate> candidates;
    for (const int fused : fused_sizes()) add_scored(fused, candidates);
    std::ranges::stable_sort(candidates, {}, [](const Candidate& candidate) { return candidate.choice.score_ms; });
    std::map<Kind, std::size_t> taken;
    std::int64_t visits = 0;
    for (Candidate& candidate : candidates) {
      const bool few = visits > with_effort(kEvenVisits);
      std::size_t& of_kind = taken[kind_of(*candidate.even)];
      if ((of_kind >= kFewEvenOfEachKind && few) || !is_possible(candidate.choice)) continue;
      ++of_kind;
      visits += visits_of(candidate.choice) * repeated(kFewestSteps);
      add(std::move(candidate.choice), candidate.even);
    }
  }

  // Keeps the best of all, and of each kind of even cuts those from which refine() starts.
  void narrow() {
    std::map<Kind, std::size_t> taken;
    std::size_t place = 0;
    std::erase_if(pool_, [&](const Candidate& candidate) {
      const bool starts = candidate.even && taken[kind_of(*candidate.even)]++ < kRefinedOfEachKind;
      return place++ >= kNarrow && !starts;
    });
  }

  // Varies even cuts while the simulated step gets shorter: the best of each kind, then the others, best first.
  void refine() {
    const int steps = steps_for(kPoolVisits, kFewestSteps, kMostSteps);
    std::map<Kind, std::size_t> taken;
    std::vector<Candidate> first, others;
    for (const Candidate& candidate : pool_) {
      if (!candidate.even) continue;
      const bool is_best = taken[kind_of(*candidate.even)]++ < kRefinedOfEachKind;
      (is_best ? first : others).push_back(candidate);
    }
    std::int64_t visits = 0;
    for (Candidate& start : first) visits += descend(start, steps);
    for (Candidate& start : others) {
      if (visits < with_effort(kAllRefineVisits)) visits += descend(start, steps);
    }
    sort();
  }

  // Returns the visits that it simulated.
  std::int64_t descend(Candidate& at, int steps) {
    std::int64_t visits = 0;
    for (bool better = true; better;) {
      better = false;
      for (const Even& even : near(*at.even)) {
        if (visits > with_effort(kRefineVisits)) return visits;
        if (kind_of(even) != kind_of(*at.even)) continue;
        if (!tried_.insert(even).second) continue;
        const std::optional<Cut> cut = cut_of(even);
        if (!cut) continue;
        PlanChoice choice = choice_of(*cut);
        if (!is_possible(choice)) continue;
        visits += visits_of(choice) * steps;
        simulate(choice, steps);
        better |= choice.score_ms < at.choice.score_ms;
        add(choice, even);
        if (choice.score_ms < at.choice.score_ms) at = {std::move(choice), even};
      }
    }
    return visits;
  }

  std::vector<Even> near(const Even& even) const {
    std::vector<Even> result;
    const auto add = [&](int Even::* field, int by) {
      Even other = even;
      other.*field += by;
      result.push_back(other);
    };
    for (const int by : {1, -1, 2, -2, devices_, -devices_}) {
      add(&Even::forward, by);
      add(&Even::backward, by);
    }
    for (const int by : {1, -1, 2, -2}) {
      add(&Even::first, by);
      add(&Even::last, by);
    }
    for (const int by : {10, -10, 5, -5}) add(&Even::interleave_percent, by);
    for (const int by : {1, -1, most_heads(even.fused) - even.head, 1 - even.head}) add(&Even::head, by);
    for (const int by : {1, -1, 2, -2}) add(&Even::fused, by);
    return result;
  }

  // The forwards of the best plans with the backwards of others.
  void cross() {
    const int steps = steps_for(kPoolVisits, kFewestSteps, kMostSteps);
    std::vector<Cut> forwards, backwards;
    const auto collect = [](std::vector<Cut>& cuts, const Cut& cut, std::vector<CutStage> Cut::* part) {
      if (cuts.size() < kCrossed && std::ranges::find(cuts, cut.*part, part) == cuts.end()) cuts.push_back(cut);
    };
    for (const Candidate& candidate : pool_) {
      collect(forwards, candidate.choice.cut, &Cut::forward);
      collect(backwards, candidate.choice.cut, &Cut::backward);
    }
    std::int64_t visits = 0;
    for (const Cut& forward : forwards) {
      for (const Cut& backward : backwards) {
        if (visits > with_effort(kCrossVisits)) break;
        const std::optional<Cut> cut = schedule::crossed(forward, backward, options_.plan.mode);
        if (!cut) continue;
        PlanChoice choice = choice_of(*cut);
        visits += simulate_new(choice, steps);
      }
    }
    sort();
  }

  // Changes stages of the best plans at random while the simulated step gets shorter.
  void polish() {
    const int steps = steps_for(kPoolVisits, kFewestSteps, kMostSteps);
    std::mt19937 random(options_.seed);
    std::vector<Candidate> best(pool_.begin(), pool_.begin() + std::min<std::ptrdiff_t>(kPolished, std::ssize(pool_)));
    for (Candidate& at : best) {
      std::int64_t visits = 0;
      for (int tries = 0; tries < kMostTries && visits < with_effort(kPolishVisits); ++tries) {
        const std::optional<Cut> cut = moves_.neighbour(at.choice.cut, random);
        if (!cut || !fits(*cut)) continue;
        PlanChoice choice = choice_of(*cut);
        visits += visits_of(choice) * repeated(kClockedSteps) / kClockedForOne;
        schedule::score(choice, costs_, sums_, hops_, options_, repeated(kClockedSteps));
        if (choice.score_ms > at.choice.score_ms * kPromising) continue;
        const std::int64_t simulated_visits = simulate_new(choice, steps);
        visits += simulated_visits;
        if (simulated_visits > 0 && choice.score_ms < at.choice.score_ms) at.choice = std::move(choice);
      }
    }
    sort();
  }

  // Rates a plan by the simulated links and adds it to the pool, if it is possible and not there. Returns the visits
  // that it simulated.
  std::int64_t simulate_new(PlanChoice& choice, int steps) {
    const auto is_it = [&](const Candidate& known) { return known.choice.cut == choice.cut; };
    if (std::ranges::any_of(pool_, is_it) || !is_possible(choice)) return 0;
    simulate(choice, steps);
    add(choice);
    return visits_of(choice) * steps;
  }

  // A synchronous step is simulated alone.
  int repeated(int steps) const { return rules_.timing.asynchronous ? steps : 1; }

  static std::int64_t visits_of(const PlanChoice& choice) {
    std::int64_t visits = 0;
    for (const schedule::Job& job : choice.recipe.jobs) visits += job.microbatches.size() + 1;
    return visits;
  }

  // The part of `visits` that a search of little effort spends: the root, since few simulated steps say little.
  std::int64_t with_effort(std::int64_t visits) const {
    return static_cast<std::int64_t>(effort_share_ * static_cast<double>(visits));
  }

  // Steps for each of several plans, so that all of them take about `visits`; `once` is what one step of each takes.
  int steps_for(std::int64_t once, std::int64_t visits, int fewest, int most) const {
    return repeated(static_cast<int>(std::clamp<std::int64_t>(with_effort(visits) / (1 + once), fewest, most)));
  }

  int steps_for(std::int64_t visits, int fewest, int most) const {
    std::int64_t once = 0;
    for (const Candidate& candidate : pool_) once += visits_of(candidate.choice);
    return steps_for(once, visits, fewest, most);
  }

  Timeline simulated(const PlanChoice& choice, const Cluster& cluster, const LinkRules& rules, int steps) const {
    return simulate_links(place_over_links(choice.recipe, costs_, cluster_, rules, steps), costs_, cluster, rules)
        .timeline;
  }

  // Rates a choice by the simulated links.
  void simulate(PlanChoice& choice, int steps) const {
    const Timeline timeline = simulated(choice, cluster_, rules_, steps);
    double speeds = 0;
    for (const schedule::ClusterDevice& device : cluster_.devices) speeds += device.speed;
    // The pace of a few steps is a fit, which may come out faster than their work.
    const double least_ms = choice.rating.work_ms / speeds;
    choice.rating.step_ms = choice.score_ms = std::max(timeline.steady_step_ms, least_ms);
    choice.rating.bubble = choice.rating.step_ms > 0 ? 1 - least_ms / choice.rating.step_ms : 0;
  }

  void simulate_all(int steps) {
    for (Candidate& candidate : pool_) simulate(candidate.choice, steps);
    sort();
  }

  void simulate_all(std::vector<PlanChoice>& choices, std::int64_t visits, int fewest, int most) const {
    std::int64_t once = 0;
    for (const PlanChoice& choice : choices) once += visits_of(choice);
    for (PlanChoice& choice : choices) simulate(choice, steps_for(once, visits, fewest, most));
    std::ranges::stable_sort(choices, {}, &PlanChoice::score_ms);
  }

  void sort() {
    std::ranges::stable_sort(pool_, {}, [](const Candidate& candidate) { return candidate.choice.score_ms; });
  }

  // What shortens the step most if it is made infinitely fast; else compute, or what the search was limited by.
  std::string limit_of(const PlanChoice& choice) const {
    if (choice.rating.bubble < kSmallBubble) return "compute";
    double least_ms = choice.rating.step_ms * (1 - kSmallBubble);
    std::string limit = rules_.timing.asynchronous ? "dependencies" : "fill and drain";
    const auto consider = [&](const char* name, const Cluster& cluster, const LinkRules& rules) {
      const double ms = simulated(choice, cluster, rules, repeated(kFewestFinalSteps)).steady_step_ms;
      if (ms >= least_ms) return;
      least_ms = ms;
      limit = name;
    };
    Cluster up = cluster_, down = cluster_, host = cluster_;
    up.link_up_gb_per_s = down.link_down_gb_per_s = host.host_gb_per_s = 0;
    consider("links up", up, rules_);
    consider("links down", down, rules_);
    consider("host memory", host, rules_);
    LinkRules at_once = rules_;
    at_once.update_gb_per_s = 0;
    consider("optimizer", cluster_, at_once);
    return limit;
  }

  const LayerCosts& costs_;
  const Cluster& cluster_;
  const Cluster hops_;
  const SearchOptions options_;
  const LinkRules rules_;
  const std::vector<Cut> starts_;
  const schedule::CostSums sums_;
  const int devices_;
  const std::int64_t room_bytes_;
  const schedule::CutMoves moves_;
  const double effort_share_;  // the root of the share of kMostEffort
  std::map<std::tuple<bool, int, int>, schedule::PartitionTable> tables_;
  std::set<Even> tried_;         // by descend()
  std::vector<Candidate> pool_;  // best first, once simulated
};

}  // namespace

std::vector<schedule::Plan> place_over_links(const schedule::Plan& recipe, const LayerCosts& costs,
                                             const Cluster& cluster, const LinkRules& rules, int steps) {
  schedule::Placer placer(recipe, costs, with_hops(costs, cluster), through_host(rules.timing));
  std::vector<schedule::Plan> plans;
  for (int step = 0; step < steps; ++step) plans.push_back(placer.next());
  return plans;
}

std::vector<PlanChoice> search_links(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options,
                                     const LinkRules& rules) {
  SearchOptions one = options;
  std::int64_t left = options.effort;
  std::vector<PlanChoice> best;
  do {
    one.effort = std::min(left, kMostEffort);
    left -= one.effort;
    best = LinkSearch(costs, cluster, one, rules).run();
    for (const PlanChoice& choice : best) one.starts.push_back(choice.cut);
    one.seed += schedule::kSeedsOfSearch;
  } while (left > 0 && best.front().rating.bubble >= schedule::kNoBubble);
  return best;
}

}  // namespace roundpipe::simulate
