#include <roundpipe/schedule/partition.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace roundpipe::schedule {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Costs closer than this count as equal, so that rounding in prefix sums does not break ties.
constexpr double kRelativeTolerance = 1e-12;

void check_arguments(const std::string& where, std::span<const double> cost, std::span<const std::int64_t> bytes,
                     std::int64_t cap) {
  const auto fail = [&](const std::string& what) { throw std::invalid_argument("[" + where + "] " + what); };
  if (cost.empty()) fail("cost is empty, expected one entry a layer");
  if (!bytes.empty() && bytes.size() != cost.size())
    fail("bytes has " + std::to_string(bytes.size()) +
         " entries, expected one a layer: " + std::to_string(cost.size()));
  if (cap < 0) fail("max_stage_bytes is " + std::to_string(cap) + ", expected 0 (no cap) or more");
  if (cap > 0 && bytes.empty()) fail("max_stage_bytes is set but bytes is empty; pass the bytes of each layer");
  for (std::size_t layer = 0; layer < cost.size(); ++layer) {
    const std::string name = "layer " + std::to_string(layer);
    if (!(cost[layer] >= 0) || !std::isfinite(cost[layer]))
      fail(name + " costs " + std::to_string(cost[layer]) + ", expected a finite number that is not negative");
    if (bytes.empty()) continue;
    if (bytes[layer] < 0) fail(name + " has " + std::to_string(bytes[layer]) + " bytes, expected 0 or more");
    if (cap > 0 && bytes[layer] > cap)
      fail(name + " needs " + std::to_string(bytes[layer]) + " bytes, expected at most max_stage_bytes " +
           std::to_string(cap) + "; raise the cap or split the layer");
  }
}

int pack(std::span<const double> cost, double max_cost, std::span<const std::int64_t> bytes, std::int64_t cap) {
  int stages = 0;
  double stage_cost = kInfinity;
  std::int64_t stage_bytes = 0;
  for (std::size_t layer = 0; layer < cost.size(); ++layer) {
    const std::int64_t layer_bytes = cap > 0 ? bytes[layer] : 0;
    if (stages > 0 && stage_cost + cost[layer] <= max_cost && stage_bytes <= cap - layer_bytes) {
      stage_cost += cost[layer];
      stage_bytes += layer_bytes;
    } else {
      ++stages;
      stage_cost = cost[layer];
      stage_bytes = layer_bytes;
    }
  }
  return stages;
}

// Both passes of the dynamic program. Rows are numbers of stages; columns are numbers of layers.
class Partitioner {
 public:
  Partitioner(std::span<const double> cost, int stages, std::span<const std::int64_t> bytes, std::int64_t cap)
      : layers_(static_cast<int>(cost.size())),
        stages_(stages),
        sum_(cost.size() + 1, 0.0),
        reach_(cost.size() + 1, 0) {
    std::int64_t window_bytes = 0;
    for (std::size_t i = 1; i <= cost.size(); ++i) {
      sum_[i] = sum_[i - 1] + cost[i - 1];
      reach_[i] = reach_[i - 1];
      if (cap == 0) continue;
      window_bytes += bytes[i - 1];
      while (window_bytes > cap) window_bytes -= bytes[static_cast<std::size_t>(reach_[i]++)];
    }
  }

  std::vector<Range> run() const {
    const double limit = smallest_largest() * (1 + 1e3 * kRelativeTolerance);
    return least_squares(limit);
  }

 private:
  double stage_cost(int first, int last) const {
    return sum_[static_cast<std::size_t>(last)] - sum_[static_cast<std::size_t>(first)];
  }

  // The lowest start of the stage that ends at `last`: bytes limit it, and each stage before it needs a layer.
  int lowest_first(int stage, int last) const { return std::max(stage - 1, reach_[static_cast<std::size_t>(last)]); }

  double smallest_largest() const {
    std::vector<double> before(sum_.size(), kInfinity), now(sum_.size());
    before[0] = 0;
    for (int stage = 1; stage <= stages_; ++stage) {
      std::ranges::fill(now, kInfinity);
      for (int last = stage; last <= layers_; ++last) {
        double& best = now[static_cast<std::size_t>(last)];
        for (int first = last - 1; first >= lowest_first(stage, last) && stage_cost(first, last) < best; --first)
          best = std::min(best, std::max(before[static_cast<std::size_t>(first)], stage_cost(first, last)));
      }
      std::swap(before, now);
    }
    return before.back();
  }

  std::vector<Range> least_squares(double limit) const {
    std::vector<double> before(sum_.size(), kInfinity), now(sum_.size());
    std::vector<std::vector<int>> start(static_cast<std::size_t>(stages_) + 1, std::vector<int>(sum_.size(), -1));
    before[0] = 0;
    for (int stage = 1; stage <= stages_; ++stage) {
      std::ranges::fill(now, kInfinity);
      for (int last = stage; last <= layers_; ++last) {
        double& best = now[static_cast<std::size_t>(last)];
        for (int first = last - 1; first >= lowest_first(stage, last); --first) {
          const double cost = stage_cost(first, last);
          if (cost > limit) break;
          const double squares = before[static_cast<std::size_t>(first)] + cost * cost;
          // On a tie, the longer stage wins, so that larger stages come last.
          if (squares == kInfinity || squares > best * (1 + kRelativeTolerance)) continue;
          best = std::min(best, squares);
          start[static_cast<std::size_t>(stage)][static_cast<std::size_t>(last)] = first;
        }
      }
      std::swap(before, now);
    }
    std::vector<Range> result(static_cast<std::size_t>(stages_));
    int last = layers_;
    for (int stage = stages_; stage > 0; --stage) {
      const int first = start[static_cast<std::size_t>(stage)][static_cast<std::size_t>(last)];
      result[static_cast<std::size_t>(stage) - 1] = {first, last};
      last = first;
    }
    return result;
  }

  const int layers_;
  const int stages_;
  std::vector<double> sum_;  // prefix sums of cost
  std::vector<int> reach_;   // lowest start of a stage within the byte cap, by its end
};

}  // namespace

std::vector<Range> balanced_partition(std::span<const double> cost, int stages, std::span<const std::int64_t> bytes,
                                      std::int64_t max_stage_bytes) {
  check_arguments("balanced_partition", cost, bytes, max_stage_bytes);
  if (stages < 1)
    throw std::invalid_argument("[balanced_partition] stages is " + std::to_string(stages) + ", expected at least 1");
  const int needed = pack(cost, kInfinity, bytes, max_stage_bytes);
  const int wanted = std::min(stages, static_cast<int>(cost.size()));
  return Partitioner(cost, std::max(wanted, needed), bytes, max_stage_bytes).run();
}

int fewest_stages(std::span<const double> cost, double max_stage_cost, std::span<const std::int64_t> bytes,
                  std::int64_t max_stage_bytes) {
  check_arguments("fewest_stages", cost, bytes, max_stage_bytes);
  if (!(max_stage_cost >= 0))
    throw std::invalid_argument("[fewest_stages] max_stage_cost is " + std::to_string(max_stage_cost) +
                                ", expected 0 or more");
  return pack(cost, max_stage_cost, bytes, max_stage_bytes);
}

}  // namespace roundpipe::schedule
