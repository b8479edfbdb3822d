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

// The smallest possible cost of the largest of `stages` stages, each of which begins at first_that_fits[end] or later.
double smallest_largest(const std::vector<double>& prefix, const std::vector<int>& first_that_fits, int stages) {
  std::vector<double> before(prefix.size(), kInfinity), now(prefix.size());
  before[0] = 0;
  for (int stage = 1; stage <= stages; ++stage) {
    std::ranges::fill(now, kInfinity);
    for (auto end = static_cast<std::size_t>(stage); end < prefix.size(); ++end) {
      const auto lowest = static_cast<std::size_t>(std::max(stage - 1, first_that_fits[end]));
      for (std::size_t first = end; first-- > lowest && prefix[end] - prefix[first] < now[end];)
        now[end] = std::min(now[end], std::max(before[first], prefix[end] - prefix[first]));
    }
    std::swap(before, now);
  }
  return before.back();
}

}  // namespace

PartitionTable::PartitionTable(int first_layer, std::vector<double> prefix, std::vector<int> first_that_fits,
                               double tolerance)
    : first_layer_(first_layer),
      prefix_(std::move(prefix)),
      first_that_fits_(std::move(first_that_fits)),
      tolerance_(tolerance) {
  least_.assign(1, std::vector<double>(prefix_.size(), kInfinity));
  least_[0][0] = 0;
  begins_.assign(1, std::vector<int>(prefix_.size(), -1));
}

void PartitionTable::extend(int stages) {
  while (static_cast<int>(least_.size()) <= stages) {
    const std::vector<double>& before = least_.back();
    std::vector<double> now(prefix_.size(), kInfinity);
    std::vector<int> begin(prefix_.size(), -1);
    const int used = static_cast<int>(least_.size()) - 1;
    for (int end = used + 1; end < static_cast<int>(prefix_.size()); ++end) {
      const auto e = static_cast<std::size_t>(end);
      work_ += std::max(0, end - std::max(used, first_that_fits_[e])) / 4;  // each costs a quarter of a visit
      // From the longest stage to the shortest, which must be better by more than a tie.
      for (int start = std::max(used, first_that_fits_[e]); start < end; ++start) {
        const auto s = static_cast<std::size_t>(start);
        const double cost = prefix_[e] - prefix_[s];
        const double total = before[s] + cost * cost;
        if (total < now[e] * (1 - tolerance_)) {
          now[e] = total;
          begin[e] = start;
        }
      }
    }
    least_.push_back(std::move(now));
    begins_.push_back(std::move(begin));
  }
}

std::vector<Range> PartitionTable::cut(int stages) {
  const int layers = static_cast<int>(prefix_.size()) - 1;
  if (stages < 0 || stages > layers) return {};
  extend(stages);
  if (least_[static_cast<std::size_t>(stages)].back() == kInfinity) return {};
  std::vector<Range> result(static_cast<std::size_t>(stages));
  int last = layers;
  for (int stage = stages; stage > 0; --stage) {
    const int first = begins_[static_cast<std::size_t>(stage)][static_cast<std::size_t>(last)];
    result[static_cast<std::size_t>(stage) - 1] = {first + first_layer_, last + first_layer_};
    last = first;
  }
  return result;
}

std::vector<Range> balanced_partition(std::span<const double> cost, int stages, std::span<const std::int64_t> bytes,
                                      std::int64_t max_stage_bytes) {
  check_arguments("balanced_partition", cost, bytes, max_stage_bytes);
  if (stages < 1)
    throw std::invalid_argument("[balanced_partition] stages is " + std::to_string(stages) + ", expected at least 1");
  const int needed = pack(cost, kInfinity, bytes, max_stage_bytes);
  const int wanted = std::min(stages, static_cast<int>(cost.size()));
  const int count = std::max(wanted, needed);
  std::vector<double> prefix{0};
  std::vector<int> first_that_fits{0};
  std::int64_t window_bytes = 0;
  for (std::size_t layer = 0; layer < cost.size(); ++layer) {
    prefix.push_back(prefix.back() + cost[layer]);
    int first = first_that_fits.back();
    if (max_stage_bytes > 0) window_bytes += bytes[layer];
    while (window_bytes > max_stage_bytes) window_bytes -= bytes[static_cast<std::size_t>(first++)];
    first_that_fits.push_back(first);
  }
  const double limit = smallest_largest(prefix, first_that_fits, count) * (1 + 1e3 * kRelativeTolerance);
  for (std::size_t end = 1; end < prefix.size(); ++end) {
    int& first = first_that_fits[end];
    first = std::max(first, first_that_fits[end - 1]);
    while (prefix[end] - prefix[static_cast<std::size_t>(first)] > limit) ++first;
  }
  return PartitionTable(0, std::move(prefix), std::move(first_that_fits), kRelativeTolerance).cut(count);
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
