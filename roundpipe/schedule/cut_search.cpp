#include <roundpipe/schedule/cut_search.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include <roundpipe/schedule/cut_moves.h>

namespace roundpipe::schedule {

namespace {

constexpr int kRatedSteps = 17;
constexpr int kFinalSteps = 193;
constexpr int kFewestFinalSteps = 49;
constexpr std::int64_t kFinalVisits = 400'000;  // for each finalist
// At first, annealing accepts a cut that is slower by this share once in e times. After kPatience tries without a
// better cut, it returns to the best one.
constexpr double kTemperature = 0.001, kAsyncTemperature = 0.004;
constexpr int kPatience = 300;
constexpr std::int64_t kNeighbour = 200;  // effort of making a neighbour, in visits; each stage adds one
constexpr std::size_t kDescents = 12;
constexpr std::size_t kRounds = 8;       // descents whose results annealing starts from;
constexpr std::size_t kAsyncRounds = 3;  // fewer if each cut is clocked over many steps
constexpr double kDescentShare = 0.15;   // of the effort
constexpr std::array kInterleaves = {1.0, 1.25, 1.5, 1.6, 1.65, 1.7, 1.8};

// Replicas of the first forward and the last backward stages, for eight devices. Never destroyed: the user's threads
// may still plan while the process ends.
const auto& kHeads = *new std::vector<std::vector<int>>{
    {}, {2}, {3, 2}, {4, 2}, {6, 3}, {6, 3, 2}, {8, 4, 2}, {7, 5, 3, 2}, {8, 6, 5, 4, 3, 2}};
const auto& kTails = *new std::vector<std::vector<int>>{
    {}, {2}, {8}, {4, 8}, {2, 4, 8}, {4, 8, 8}, {4, 6, 6, 7}, {2, 3, 5, 7, 8}, {2, 4, 6, 7, 7, 8}};

// The numbers that describe a cut made of exact partitions.
enum Coordinate {
  kFused,
  kFusedReplicas,
  kHeadOnes,
  kForward,
  kTailOnes,
  kBackward,
  kHead,
  kTail,
  kInterleave,
  kCount
};
using Shape = std::array<int, kCount>;

class CutSearch {
 public:
  CutSearch(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options)
      : costs_(costs),
        cluster_(cluster),
        options_(options),
        sums_(sums_of(costs, options.plan)),
        layers_(sums_.layers()),
        devices_(static_cast<int>(cluster.devices.size())),
        room_bytes_(largest_room_bytes(cluster)),
        moves_(options, sums_, devices_),
        random_(options.seed) {
    std::set<std::pair<double, std::int64_t>> kinds;
    for (const ClusterDevice& device : cluster.devices) kinds.emplace(device.speed, device.memory_bytes);
    if (kinds.size() > 1) clocked_times_ += static_cast<std::int64_t>(kinds.size());
    check_layers();
  }

  CutsFound run() {
    for (const Cut& start : options_.starts) {
      if (moves_.allows(start)) start_from(start);
    }
    limit_backward_stages();
    if (const std::optional<Cut> cut = safest()) consider(*cut);
    consider(greedy());
    consider(limited_cut(to_cut(choose_stages(costs_, devices_, balanced_options())), layers_, options_));
    descend();
    anneal();
    return finish();
  }

 private:
  PlannerOptions balanced_options() const {
    PlannerOptions options = options_.plan;
    options.max_stage_bytes = 0;
    return options;
  }

  Cut greedy() const { return limited_cut(to_cut(greedy_stages(costs_, devices_, options_.plan)), layers_, options_); }

  // Every layer in a stage of its own, which fits if any plan does.
  Cut single_layers() const {
    Cut cut;
    const int end = has_fused() ? layers_ - 1 : layers_;
    for (int layer = 0; layer < end; ++layer) cut.forward.push_back({{layer, layer + 1}, 1});
    if (has_fused()) cut.backward.push_back({{end, layers_}, 1});
    for (int layer = end - 1; trains() && layer >= options_.plan.first_backward_layer; --layer)
      cut.backward.push_back({{layer, layer + 1}, 1});
    return cut;
  }

  // Single layers, going backward in as many even stages as may wait for each other on the host.
  std::optional<Cut> safest() {
    Cut single = single_layers();
    if (moves_.fits_host(single)) return single;
    return build(even(layers_, most_backward_));
  }

  int forward_layers() const { return has_fused() ? layers_ - 1 : layers_; }
  int backward_layers() const { return std::max(0, forward_layers() - options_.plan.first_backward_layer); }

  // Of one fused layer.
  Shape even(int forward, int backward) const {
    Shape shape{};
    shape[kFused] = shape[kFusedReplicas] = 1;
    shape[kForward] = std::min(forward, forward_layers());
    shape[kBackward] = std::min(backward, backward_layers());
    return shape;
  }

  // Sets the most even backward stages whose inputs may wait on the host together; if none may, the fewest that fit a
  // device.
  void limit_backward_stages() {
    most_backward_ = backward_layers();
    if (!trains() || moves_.fits_host(single_layers())) return;
    for (int stages = backward_layers(); stages >= std::min(1, backward_layers()); --stages) {
      const std::optional<Cut> cut = build(even(layers_, stages));
      if (!cut) continue;
      most_backward_ = stages;
      least_waiting_ = waiting_bytes(*cut, sums_, options_.plan.microbatches);
      if (moves_.fits_host(*cut)) return;
    }
  }

  bool trains() const { return moves_.trains(); }
  bool has_fused() const { return moves_.has_fused(); }
  bool overlaps() const { return moves_.overlaps(); }

  bool fits(Range layers, bool backward) const { return sums_.fits(layers, backward, room_bytes_); }

  void check_layers() const {
    for (int layer = 0; layer < layers_; ++layer) {
      const bool backward = trains() && layer >= options_.plan.first_backward_layer;
      if (fits({layer, layer + 1}, backward)) continue;
      throw LayerTooLarge("[plan] costs[" + std::to_string(layer) + "] needs " +
                          std::to_string(sums_.visit_bytes({layer, layer + 1}, backward, true)) +
                          " bytes on a device, expected at most the largest device's " + std::to_string(room_bytes_) +
                          "; split the layer or use fewer samples a microbatch");
    }
  }

  void start_from(const Cut& cut) {
    const double ms = consider(cut);
    if (std::isfinite(ms)) descended_.emplace_back(ms, cut);
  }

  // --- rating ---

  // Returns milliseconds per step, or infinity for a cut that breaks a limit. Remembers the best cuts.
  double consider(const Cut& cut) {
    if (!moves_.fits_host(cut)) {
      host_binds_ = true;
      return std::numeric_limits<double>::infinity();
    }
    for (std::size_t i = 0; i < cut.forward.size() + cut.backward.size(); ++i) {
      const bool forward = i < cut.forward.size();
      const CutStage& stage = forward ? cut.forward[i] : cut.backward[i - cut.forward.size()];
      if (!fits(stage.layers, !forward)) {
        memory_binds_ |= sums_.may_be_stage(stage.layers, !forward);
        return std::numeric_limits<double>::infinity();
      }
    }
    Plan recipe = to_recipe(cut, sums_, devices_, options_.plan);
    const double traffic = traffic_ratio(recipe, sums_);
    if (options_.max_traffic > 0 && traffic > options_.max_traffic + 1e-9) {
      traffic_binds_ = true;
      return std::numeric_limits<double>::infinity();
    }
    const int steps = options_.rules.asynchronous ? kRatedSteps : 1;
    spent_ += (steps + 1) * visits(recipe);
    PlanChoice choice{cut, std::move(recipe), {}, 0, traffic, {}};
    score(choice, costs_, sums_, cluster_, options_, steps);
    if (choice.rating.crowded > 0) {
      memory_binds_ = true;
      return std::numeric_limits<double>::infinity();
    }
    const double score_ms = choice.score_ms;
    keep(std::move(choice));
    return score_ms;
  }

  // The effort of clocking one step, in microbatch visits. Each job adds a fixed effort and one visit per device; where
  // devices differ, it is clocked on one of each kind.
  std::int64_t visits(const Plan& recipe) const {
    constexpr std::int64_t kJob = 12;
    std::int64_t count = 0;
    for (const Job& job : recipe.jobs) count += job.microbatches.size() * clocked_times_ + kJob + recipe.devices;
    return count;
  }

  void keep(PlanChoice choice) {
    for (const PlanChoice& known : best_) {
      if (known.cut == choice.cut) return;
    }
    const auto place = std::ranges::upper_bound(best_, choice.score_ms, {}, &PlanChoice::score_ms);
    if (place - best_.begin() >= options_.finalists) return;
    best_.insert(place, std::move(choice));
    if (static_cast<int>(best_.size()) > options_.finalists) best_.pop_back();
  }

  bool has_effort(double share) const {
    return static_cast<double>(spent_) < share * static_cast<double>(options_.effort);
  }

  // --- shapes ---

  PartitionTable& table(Range layers, bool backward) {
    const auto key = std::make_tuple(layers.first, layers.last, backward);
    const auto found = tables_.find(key);
    if (found != tables_.end()) return found->second;
    return tables_.emplace(key, partitions_of(sums_, layers, backward, room_bytes_)).first->second;
  }

  int scaled(int replicas) const {
    const int most = std::min(devices_, options_.plan.microbatches);
    return std::clamp(static_cast<int>(std::lround(replicas * devices_ / 8.0)), 1, std::max(1, most));
  }

  // Returns nothing if no cut has this shape.
  std::optional<Cut> build(const Shape& shape) {
    std::optional<Cut> cut = build_unlimited(shape);
    if (cut) moves_.limit_replicas(*cut);
    return cut;
  }

  // Does not limit the replicas.
  std::optional<Cut> build_unlimited(const Shape& shape) {
    const int fused = has_fused() ? shape[kFused] : 0;
    if (has_fused() && (fused < 1 || fused > std::min(layers_, std::max(1, options_.max_fused_layers))))
      return std::nullopt;
    const int end = layers_ - fused;
    Cut cut;
    cut.interleave = kInterleaves[static_cast<std::size_t>(shape[kInterleave])];
    if (end > 0) {
      const int ones = shape[kHeadOnes];
      if (ones < 0 || ones > end || (ones == end) != (shape[kForward] == 0)) return std::nullopt;
      for (int layer = 0; layer < ones; ++layer) cut.forward.push_back({{layer, layer + 1}, 1});
      if (ones < end) {
        PartitionTable& partitions = table({ones, end}, false);
        const std::vector<Range> rest = partitions.cut(shape[kForward]);
        spent_ += partitions.take_work();
        if (rest.empty()) return std::nullopt;
        for (const Range& layers : rest) cut.forward.push_back({layers, 1});
      }
      const std::vector<int>& head = kHeads[static_cast<std::size_t>(shape[kHead])];
      for (std::size_t i = 0; i < std::min(head.size(), cut.forward.size()); ++i)
        cut.forward[i].replicas = scaled(head[i]);
    }
    if (!trains()) return cut;
    if (fused > 0) cut.backward.push_back({{end, layers_}, std::max(1, shape[kFusedReplicas])});
    const int lowest = options_.plan.first_backward_layer;
    if (lowest < end) {
      const int ones = shape[kTailOnes], first = lowest + ones;
      if (ones < 0 || first > end || (first == end) != (shape[kBackward] == 0)) return std::nullopt;
      if (first < end) {
        PartitionTable& partitions = table({first, end}, true);
        const std::vector<Range> rest = partitions.cut(shape[kBackward]);
        spent_ += partitions.take_work();
        if (rest.empty()) return std::nullopt;
        for (auto layers = rest.rbegin(); layers != rest.rend(); ++layers) cut.backward.push_back({*layers, 1});
      }
      for (int layer = first - 1; layer >= lowest; --layer) cut.backward.push_back({{layer, layer + 1}, 1});
      const std::vector<int>& tail = kTails[static_cast<std::size_t>(shape[kTail])];
      const std::size_t count = std::min(tail.size(), cut.backward.size() - (fused > 0 ? 1 : 0));
      for (std::size_t i = 0; i < count; ++i)
        cut.backward[cut.backward.size() - count + i].replicas = scaled(tail[tail.size() - count + i]);
    }
    return cut;
  }

  double consider(const Shape& shape) {
    const auto known = rated_.find(shape);
    if (known != rated_.end()) return known->second;
    const std::optional<Cut> cut = build(shape);
    return rated_[shape] = cut ? consider(*cut) : std::numeric_limits<double>::infinity();
  }

  // The values to try for a coordinate, given its present value.
  std::vector<int> choices(const Shape& shape, int coordinate) const {
    const auto window = [&](int lowest, int highest) {
      std::vector<int> values;
      const int at = shape[static_cast<std::size_t>(coordinate)];
      for (int value = std::max(lowest, at - 6); value <= std::min(highest, at + 6); ++value) values.push_back(value);
      return values;
    };
    const auto all = [](std::size_t count) {
      std::vector<int> values;
      for (std::size_t i = 0; i < count; ++i) values.push_back(static_cast<int>(i));
      return values;
    };
    const int most = std::min(devices_, options_.plan.microbatches);
    switch (coordinate) {
      case kFused:
        return has_fused() ? window(1, std::min(layers_, options_.max_fused_layers)) : std::vector<int>{};
      case kFusedReplicas:
        return has_fused() && options_.replicas
                   ? window(1, moves_.most_shared({layers_ - shape[kFused], layers_}, true))
                   : std::vector<int>{};
      case kHeadOnes:
      case kForward:
        return window(0, layers_);
      case kTailOnes:
      case kBackward:
        return trains() ? window(0, layers_) : std::vector<int>{};
      case kHead:
        return options_.replicas && most > 1 ? all(kHeads.size()) : std::vector<int>{};
      case kTail:
        return options_.replicas && most > 1 && trains() ? all(kTails.size()) : std::vector<int>{};
      case kInterleave:
        return overlaps() ? all(kInterleaves.size()) : std::vector<int>{};
      default:
        return {};
    }
  }

  // As many fused layers as fit.
  int most_fused() const {
    int fused = std::min(options_.max_fused_layers, layers_ - options_.plan.first_backward_layer);
    while (fused > 1 && !fits({layers_ - fused, layers_}, /*backward=*/true)) --fused;
    return std::max(1, fused);
  }

  std::vector<Shape> starts() const {
    const int n = devices_, forward = forward_layers(), backward = most_backward_;
    std::vector<Shape> shapes;
    if (has_fused() && options_.max_fused_layers > 1 && options_.replicas) {
      // Kept layers save work, and leave none idle where several devices share them.
      const int fused = most_fused(), end = layers_ - fused;
      const int replicas = moves_.most_shared({end, layers_}, true);
      for (const int stages : {1, n, 2 * n}) {
        if (replicas == 1) break;
        Shape shape = even(std::min(stages, end), std::min(stages, end - options_.plan.first_backward_layer));
        shape[kFused] = fused;
        shape[kFusedReplicas] = replicas;
        shapes.push_back(shape);
      }
    }
    for (const int f : {n, 2 * n, forward, (n + 1) / 2, 3 * n}) {
      for (const int b : {backward, 2 * n, 3 * n, n}) {
        for (const int replicas : {1, std::max(1, n - 1)}) {
          Shape shape = even(f, std::min(b, backward));
          if (options_.replicas) shape[kFusedReplicas] = std::min(replicas, options_.plan.microbatches);
          shapes.push_back(shape);
        }
      }
    }
    if (options_.replicas && !options_.rules.asynchronous) {
      // A step that fills and drains alone wants one-layer stages at both ends, shared by many devices.
      for (const int tail : {4, 7, 8}) {
        for (const int head : {4, 5, 8}) {
          for (const int replicas : {1, std::max(1, n / 2 + 1)}) {
            Shape shape = even(0, backward);
            shape[kFusedReplicas] = std::min(replicas, options_.plan.microbatches);
            shape[kHeadOnes] = std::min(2 * n, forward);
            shape[kForward] = (forward - shape[kHeadOnes] + 1) / 2;
            shape[kHead] = head;
            shape[kTail] = tail;
            shapes.push_back(shape);
          }
        }
      }
    }
    return shapes;
  }

  void descend() {
    std::vector<std::pair<double, Shape>> ranked;
    const double already =
        static_cast<double>(spent_) / static_cast<double>(std::max<std::int64_t>(1, options_.effort));
    for (const Shape& shape : starts()) {
      const double ms = consider(shape);
      if (std::isfinite(ms)) ranked.emplace_back(ms, shape);
      if (!has_effort(0.05 + already)) break;
    }
    std::ranges::sort(ranked);
    const std::size_t count = std::min<std::size_t>(kDescents, ranked.size());
    const double first = static_cast<double>(spent_) / static_cast<double>(std::max<std::int64_t>(1, options_.effort));
    for (std::size_t start = 0; start < count; ++start) {
      auto [ms, shape] = ranked[start];
      for (bool better = true; better && has_effort(first + (kDescentShare - 0.05) * static_cast<double>(start + 1) /
                                                                static_cast<double>(count));) {
        better = false;
        for (int coordinate = 0; coordinate < kCount; ++coordinate) {
          for (const int value : choices(shape, coordinate)) {
            Shape other = shape;
            other[static_cast<std::size_t>(coordinate)] = value;
            better |= take(other, ms, shape);
            // Also try it with the total number of stages unchanged: one-layer stages replace others.
            const int pair = coordinate == kHeadOnes ? kForward : coordinate == kTailOnes ? kBackward : -1;
            if (pair < 0) continue;
            const auto p = static_cast<std::size_t>(pair), c = static_cast<std::size_t>(coordinate);
            other[p] = std::max(0, shape[p] - (value - shape[c]));
            better |= take(other, ms, shape);
          }
        }
      }
      if (const std::optional<Cut> cut = build(shape)) descended_.emplace_back(ms, *cut);
    }
  }

  bool take(const Shape& other, double& ms, Shape& shape) {
    const double other_ms = consider(other);
    if (!(other_ms < ms * (1 - 1e-9))) return false;
    ms = other_ms;
    shape = other;
    return true;
  }

  // --- annealing ---

  // Starts from the result of each descent, best first, and finally from the best cut of all.
  void anneal() {
    std::ranges::stable_sort(descended_, {}, [](const auto& result) { return result.first; });
    const std::size_t rounds = std::min(options_.rules.asynchronous ? kAsyncRounds : kRounds, descended_.size());
    const double begin = static_cast<double>(spent_) / static_cast<double>(std::max<std::int64_t>(1, options_.effort));
    std::vector<Cut> annealed;
    for (std::size_t round = 0; round < rounds; ++round) {
      const double share = begin + (1 - begin) * static_cast<double>(round + 1) / static_cast<double>(rounds + 1);
      const Cut best = anneal(descended_[round].second, descended_[round].first, share);
      for (const Cut& other : annealed) {
        cross(best, other);
        cross(other, best);
      }
      annealed.push_back(best);
    }
    if (!best_.empty()) anneal(best_.front().cut, best_.front().score_ms, 1);
  }

  void cross(const Cut& forward, const Cut& backward) {
    const std::optional<Cut> cut = crossed(forward, backward, options_.plan.mode);
    if (cut && *cut != forward && *cut != backward) consider(*cut);
  }

  // Stops when `share` of the effort is spent. Returns the best cut it met.
  Cut anneal(const Cut& from, double from_ms, double share) {
    Cut at = from, best = from;
    double at_ms = from_ms, best_ms = from_ms;
    const double begin = static_cast<double>(spent_), end = share * static_cast<double>(options_.effort);
    int since_best = 0;
    // Tries that clock no plan spend almost no effort, so the number of tries is bounded too.
    for (int tries = 0; tries < 100'000 && has_effort(share); ++tries) {
      const double left = 1 - (static_cast<double>(spent_) - begin) / std::max(1.0, end - begin);
      const std::optional<Cut> other = moves_.neighbour(at, random_);
      spent_ += kNeighbour + static_cast<std::int64_t>(at.forward.size() + at.backward.size());
      if (!other) continue;
      const double ms = consider(*other);
      const double worse = (ms - at_ms) / at_ms;
      const double temperature = (options_.rules.asynchronous ? kAsyncTemperature : kTemperature) * left;
      const double chance = static_cast<double>(random_()) / static_cast<double>(random_.max());
      if (worse <= 0 || (std::isfinite(worse) && temperature > 0 && chance < std::exp(-worse / temperature))) {
        at = *other;
        at_ms = ms;
      }
      ++since_best;
      if (ms < best_ms) {
        best = *other;
        best_ms = ms;
        since_best = 0;
      }
      if (since_best > kPatience) {
        at = best;
        at_ms = best_ms;
        since_best = 0;
      }
    }
    return best;
  }

  CutsFound finish() {
    std::vector<PlanChoice> choices = std::move(best_);
    if (options_.rules.asynchronous) {
      // Clocked over few steps, the greedy plan may seem slower than it is.
      choices = rated_finally(std::move(choices));
      best_.clear();
      consider(greedy());
      for (PlanChoice& choice : rated_finally(std::move(best_))) {
        if (std::ranges::find(choices, choice.cut, &PlanChoice::cut) == choices.end())
          choices.push_back(std::move(choice));
      }
      best_.clear();
      const std::optional<Cut> last = choices.empty() ? safest() : std::nullopt;
      if (last) consider(*last);
      if (choices.empty()) choices = rated_finally(std::move(best_));
      std::ranges::stable_sort(choices, {}, &PlanChoice::score_ms);
    }
    return {std::move(choices), traffic_binds_, memory_binds_, host_binds_, least_waiting_};
  }

  // Without those for which a device has no room at some step.
  std::vector<PlanChoice> rated_finally(std::vector<PlanChoice> choices) const {
    std::erase_if(choices, [&](PlanChoice& choice) { return !rate_finally(choice); });
    return choices;
  }

  // Returns false if a device has no room for its next job at some step.
  bool rate_finally(PlanChoice& choice) const {
    const int affordable = static_cast<int>(kFinalVisits / visits(choice.recipe));
    const int steps = std::clamp(affordable, kFewestFinalSteps, kFinalSteps);
    score(choice, costs_, sums_, cluster_, options_, steps);
    return choice.rating.crowded == 0;
  }

  const LayerCosts& costs_;
  const Cluster& cluster_;
  const SearchOptions options_;
  const CostSums sums_;
  const int layers_;
  const int devices_;
  const std::int64_t room_bytes_;
  const CutMoves moves_;
  std::int64_t clocked_times_ = 1;
  std::mt19937 random_;
  std::map<std::tuple<int, int, bool>, PartitionTable> tables_;
  std::map<Shape, double> rated_;
  std::vector<PlanChoice> best_;  // best first
  std::vector<std::pair<double, Cut>> descended_;
  std::int64_t spent_ = 0;
  bool traffic_binds_ = false;
  bool memory_binds_ = false;
  bool host_binds_ = false;
  int most_backward_ = 0;  // see limit_backward_stages()
  std::int64_t least_waiting_ = 0;
};

}  // namespace

CutsFound search_cuts(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options) {
  return CutSearch(costs, cluster, options).run();
}

}  // namespace roundpipe::schedule
