#include <roundpipe/simulate/link_search.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include <roundpipe/simulate/even_cuts.h>

namespace roundpipe::simulate {

using schedule::Cluster;
using schedule::Cut;
using schedule::CutMoves;
using schedule::CutStage;
using schedule::LayerCosts;
using schedule::PlanChoice;
using schedule::SearchOptions;

namespace {

// Of the effort, for the search without links; overlapping steps leave less to it, and more to simulate.
constexpr double kSyncEffort = 0.67, kAsyncEffort = 0.25;
constexpr int kSearchedOfRun = 3;
constexpr std::size_t kEvenOfKind = 4;    // plans of a kind of even cuts that rungs take
constexpr std::size_t kFewestOfKind = 2;  // that are simulated, however long they take
constexpr std::size_t kRefinedOfKind = 2;
constexpr std::size_t kCrossed = 6;
constexpr std::size_t kPolished = 2;
constexpr std::size_t kFinalOfRung = 4;
constexpr std::size_t kFinal = 4;
constexpr std::size_t kReported = 2;
constexpr double kNearTie = 0.002;  // plans that may turn out to be ties when they are simulated for longer
// Effort, in simulated visits of a microbatch to a stage; one takes about 0.6 us.
constexpr std::int64_t kEvenVisits = 40'000;    // for each kind
constexpr std::int64_t kRefineVisits = 15'000;  // for each start
// For each rung, by what it allows: crossing takes a third.
constexpr std::int64_t kWithoutReplicas = 30'000, kLittleTraffic = 12'000, kMostTraffic = 75'000;
constexpr double kLittle = 2;  // traffic of the rungs that get less
constexpr int kMostTries = 4000;
constexpr double kPromising = 1.005;  // a plan whose clocked step is longer than this is not simulated

// For the searches and clocks without a simulation of links.
SearchOptions without_links(SearchOptions options, const LinkRules& rules) {
  options.rules = through_host(rules.timing);
  options.update = rules.update;
  options.effort =
      std::llround((rules.timing.asynchronous ? kAsyncEffort : kSyncEffort) * static_cast<double>(options.effort));
  options.finalists = kSearchedOfRun;
  options.starts.clear();
  return options;
}

// Plans with different cuts, best first once they are sorted.
class Pool {
 public:
  void add(PlanChoice choice) {
    if (!has(choice.cut)) choices_.push_back(std::move(choice));
  }
  bool has(const Cut& cut) const { return std::ranges::find(choices_, cut, &PlanChoice::cut) != choices_.end(); }
  void sort() { std::ranges::stable_sort(choices_, {}, &PlanChoice::score_ms); }
  void keep(std::size_t most) {
    sort();
    if (choices_.size() > most) choices_.resize(most);
  }
  std::vector<PlanChoice>& choices() { return choices_; }

 private:
  std::vector<PlanChoice> choices_;
};

// The limits of some runs of the search without links, and what they found; then the best plans within these limits.
struct Rung {
  SearchOptions limits;
  std::vector<PlanChoice> searched;
  std::vector<PlanChoice> best;
};

std::int64_t visits_of_rung(const SearchOptions& limits) {
  const bool little = limits.max_traffic > 0 && limits.max_traffic <= kLittle;
  const std::int64_t visits = !limits.replicas ? kWithoutReplicas : little ? kLittleTraffic : kMostTraffic;
  // A synchronous step is simulated alone, and has no rungs with overlap.
  const std::int64_t times = limits.rules.asynchronous ? 1 : 2;
  return times * (limits.max_fused_layers > 1 ? visits / 2 : visits);
}

class LinkSearch {
 public:
  LinkSearch(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options, const LinkRules& rules)
      : costs_(costs),
        hops_(with_hops(costs, cluster)),
        options_(without_links(options, rules)),
        rules_(rules),
        starts_(options.starts),
        devices_(static_cast<int>(cluster.devices.size())),
        effort_share_(std::sqrt(static_cast<double>(options.effort) / static_cast<double>(schedule::kMostEffort))),
        rating_(costs, cluster, options_, rules_, effort_share_),
        even_(options_, rating_.sums(), devices_, schedule::largest_room_bytes(cluster)) {}

  std::vector<PlanChoice> run() {
    const std::vector<schedule::SearchRun> runs = schedule::search_runs(costs_, hops_, options_);
    make_rungs(runs);
    for (Rung& rung : rungs_) climb(rung);
    Pool pool;
    for (Rung& rung : rungs_) {
      for (PlanChoice& choice : rung.best) pool.add(std::move(choice));
    }
    if (pool.choices().empty()) schedule::throw_no_plan(runs, options_);
    pool.sort();
    // Ties are settled once, by the longest simulation: settled twice, they would add up.
    const double near_ms = pool.choices().front().score_ms * (1 + kNearTie);
    const auto near =
        std::ranges::count_if(pool.choices(), [&](const PlanChoice& choice) { return choice.score_ms <= near_ms; });
    pool.keep(std::clamp(static_cast<std::size_t>(near), kReported, kFinal));
    const Precision precision = options_.promises ? Precision::kPromise : Precision::kReport;
    for (PlanChoice& choice : pool.choices()) rating_.rate(choice, precision);
    pool.sort();
    std::vector<PlanChoice> choices = std::move(pool.choices());
    schedule::settle_ties(choices, rating_.sums());
    choices.resize(std::min(choices.size(), kReported));
    choices.front().limit = rating_.limit_of(choices.front());
    return choices;
  }

 private:
  // Runs with the same limits and other random numbers share a rung.
  void make_rungs(const std::vector<schedule::SearchRun>& runs) {
    for (const schedule::SearchRun& run : runs) {
      const bool again = !rungs_.empty() && schedule::is_within(rungs_.back().limits, run.limits) &&
                         schedule::is_within(run.limits, rungs_.back().limits);
      if (!again) rungs_.push_back({run.limits, {}, {}});
      std::vector<PlanChoice>& searched = rungs_.back().searched;
      searched.insert(searched.end(), run.found.choices.begin(), run.found.choices.end());
    }
  }

  // Finds the best plans within the limits of a rung.
  void climb(Rung& rung) {
    Pool pool;
    const CutMoves moves(rung.limits, rating_.sums(), devices_);
    for (const Rung& before : rungs_) {
      if (&before == &rung) break;
      if (!schedule::is_within(before.limits, rung.limits)) continue;
      if (!before.best.empty() && before.limits.max_fused_layers == rung.limits.max_fused_layers &&
          schedule::is_settled(before.best.front(), rung.limits, rating_.sums().layers(), devices_))
        return;
      for (const PlanChoice& choice : before.best) add(pool, rung, choice);
    }
    for (const PlanChoice& choice : rung.searched) add(pool, rung, choice);
    add_known(pool, rung, moves);
    for (const EvenKind& kind : kinds_of(rung.limits)) {
      for (const PlanChoice& choice : evens_of(kind)) add(pool, rung, choice);
    }
    pool.sort();
    const std::int64_t most_visits = with_effort(visits_of_rung(rung.limits));
    cross(pool, rung, rating_.visits() + most_visits / 3);
    for (std::size_t i = 0; i < std::min(kPolished, pool.choices().size()); ++i)
      polish(pool, rung, moves, pool.choices()[i], rating_.visits() + most_visits / 3);
    pool.keep(kFinalOfRung);
    for (PlanChoice& choice : pool.choices()) rating_.rate(choice, Precision::kChoose);
    pool.sort();
    rung.best = std::move(pool.choices());
  }

  // Adds a plan, rated by the links, if it is possible and moves little enough.
  bool add(Pool& pool, const Rung& rung, PlanChoice choice) {
    if (rung.limits.max_traffic > 0 && choice.traffic > rung.limits.max_traffic + 1e-9) return false;
    if (!even_.fits_host(choice.cut) || !rating_.rate(choice, Precision::kCompare)) return false;
    pool.add(std::move(choice));
    return true;
  }

  // The greedy cut, and the caller's.
  void add_known(Pool& pool, const Rung& rung, const CutMoves& moves) {
    const Cut greedy = schedule::to_cut(schedule::greedy_stages(costs_, devices_, options_.plan));
    std::vector<Cut> known{schedule::limited_cut(greedy, rating_.sums().layers(), rung.limits)};
    std::ranges::copy_if(starts_, std::back_inserter(known), [&](const Cut& cut) { return moves.allows(cut); });
    for (const Cut& cut : known) {
      if (even_.fits(cut)) add(pool, rung, rating_.choice_of(cut));
    }
  }

  // --- even cuts ---

  std::vector<EvenKind> kinds_of(const SearchOptions& limits) const {
    const CutMoves moves(limits, rating_.sums(), devices_);
    const int layers = rating_.sums().layers();
    std::set<int> heads{1};
    if (limits.replicas && moves.has_fused()) heads.insert(moves.most_shared({layers - 1, layers}, true));
    std::vector<EvenKind> kinds;
    const int most_fused = std::min(limits.max_fused_layers, layers);
    for (int fewest = 1; fewest <= most_fused; fewest = fewest < 3 ? fewest + 1 : layers + 1) {
      const int most = fewest < 3 ? fewest : most_fused;
      for (const int head : heads) {
        kinds.push_back({fewest, most, head, false});
        if (moves.overlaps()) kinds.push_back({fewest, most, head, true});
      }
    }
    return kinds;
  }

  // The best even cuts of a kind, varied while the simulated step gets shorter.
  const std::vector<PlanChoice>& evens_of(const EvenKind& kind) {
    const auto [known, is_new] = evens_.try_emplace(kind);
    if (!is_new) return known->second;
    std::vector<std::pair<Even, PlanChoice>> scored;
    for (const Even& even : even_.spread(kind)) {
      const std::optional<Cut> cut = even_.cut_of(even);
      if (!cut) continue;
      PlanChoice choice = rating_.choice_of(*cut);
      rating_.score(choice);
      if (choice.rating.crowded == 0) scored.emplace_back(even, std::move(choice));
    }
    const auto step_ms = [](const auto& entry) { return entry.second.score_ms; };
    std::ranges::stable_sort(scored, {}, step_ms);
    const std::int64_t most_visits = rating_.visits() + with_effort(kEvenVisits) / (kind.most_fused > 1 ? 2 : 1);
    std::vector<std::pair<Even, PlanChoice>> rated;
    for (auto& entry : scored) {
      if (rated.size() >= kFewestOfKind && rating_.visits() > most_visits) break;
      if (rating_.rate(entry.second, Precision::kCompare)) rated.push_back(std::move(entry));
    }
    std::ranges::stable_sort(rated, {}, step_ms);
    Pool pool;
    std::set<Even> tried;
    for (std::size_t i = 0; i < std::min(kRefinedOfKind, rated.size()); ++i)
      descend(pool, kind, rated[i].first, rated[i].second, tried);
    for (auto& entry : rated) pool.add(std::move(entry.second));
    pool.keep(kEvenOfKind);
    known->second = std::move(pool.choices());
    return known->second;
  }

  void descend(Pool& pool, const EvenKind& kind, Even at, PlanChoice best, std::set<Even>& tried) {
    const std::int64_t most_visits = rating_.visits() + with_effort(kRefineVisits) / (kind.most_fused > 1 ? 2 : 1);
    for (bool better = true; better;) {
      better = false;
      for (const Even& even : even_.near(at, kind)) {
        if (rating_.visits() > most_visits) break;
        if (!kind.has(even) || !tried.insert(even).second) continue;
        const std::optional<Cut> cut = even_.cut_of(even);
        if (!cut) continue;
        PlanChoice choice = rating_.choice_of(*cut);
        if (!rating_.rate(choice, Precision::kCompare) || choice.score_ms >= best.score_ms) continue;
        better = true;
        at = even;
        best = std::move(choice);
      }
    }
    pool.add(std::move(best));
  }

  // --- any cuts ---

  // The forwards of the best plans with the backwards of others.
  void cross(Pool& pool, const Rung& rung, std::int64_t most_visits) {
    std::vector<Cut> forwards, backwards;
    const auto collect = [](std::vector<Cut>& cuts, const Cut& cut, std::vector<CutStage> Cut::* part) {
      if (cuts.size() < kCrossed && std::ranges::find(cuts, cut.*part, part) == cuts.end()) cuts.push_back(cut);
    };
    for (const PlanChoice& choice : pool.choices()) {
      collect(forwards, choice.cut, &Cut::forward);
      collect(backwards, choice.cut, &Cut::backward);
    }
    for (const Cut& forward : forwards) {
      for (const Cut& backward : backwards) {
        if (rating_.visits() > most_visits) break;
        const std::optional<Cut> cut = schedule::crossed(forward, backward, options_.plan.mode);
        if (cut && !pool.has(*cut)) add(pool, rung, rating_.choice_of(*cut));
      }
    }
    pool.sort();
  }

  // Changes stages of a plan at random while the simulated step gets shorter.
  void polish(Pool& pool, const Rung& rung, const CutMoves& moves, PlanChoice at, std::int64_t most_visits) {
    std::mt19937 random(options_.seed);
    std::int64_t clocked = 0;
    for (int tries = 0; tries < kMostTries && rating_.visits() + clocked < most_visits; ++tries) {
      const std::optional<Cut> cut = moves.neighbour(at.cut, random);
      if (!cut || !even_.fits(*cut)) continue;
      PlanChoice choice = rating_.choice_of(*cut);
      clocked += rating_.scored_visits(choice);
      rating_.score(choice);
      if (choice.score_ms > at.score_ms * kPromising) continue;
      if (!rating_.rate(choice, Precision::kCompare)) continue;
      const bool better = choice.score_ms < at.score_ms;
      if (!add(pool, rung, choice)) continue;
      if (better) at = std::move(choice);
    }
  }

  // The part of `visits` that a search of little effort spends: the root, since few simulated steps say little.
  std::int64_t with_effort(std::int64_t visits) const {
    return static_cast<std::int64_t>(effort_share_ * static_cast<double>(visits));
  }

  const LayerCosts& costs_;
  const Cluster hops_;
  const SearchOptions options_;
  const LinkRules rules_;
  const std::vector<Cut> starts_;
  const int devices_;
  const double effort_share_;  // the root of the share of kMostEffort
  LinkRating rating_;
  EvenCuts even_;
  std::vector<Rung> rungs_;
  std::map<EvenKind, std::vector<PlanChoice>> evens_;
};

}  // namespace

std::vector<PlanChoice> search_links(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options,
                                     const LinkRules& rules) {
  SearchOptions one = options;
  std::int64_t left = options.effort;
  std::vector<PlanChoice> best;
  do {
    one.effort = std::min(left, schedule::kMostEffort);
    left -= one.effort;
    best = LinkSearch(costs, cluster, one, rules).run();
    for (const PlanChoice& choice : best) one.starts.push_back(choice.cut);
    one.seed += schedule::kSeedsOfSearch;
  } while (left > 0 && best.front().rating.bubble >= schedule::kNoBubble);
  return best;
}

}  // namespace roundpipe::simulate
