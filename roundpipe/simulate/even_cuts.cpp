#include <roundpipe/simulate/even_cuts.h>

#include <algorithm>
#include <iterator>
#include <set>

namespace roundpipe::simulate {

using schedule::Cut;
using schedule::CutStage;
using schedule::Range;

namespace {

constexpr int kEachNumber = 12, kFewNumbers = 4;  // up to so many stages, each number is tried
constexpr int kMostPercent = 150;

}  // namespace

bool EvenKind::has(const Even& even) const {
  return even.fused >= fewest_fused && even.fused <= most_fused && (even.head > 1) == (heads > 1) &&
         even.head <= heads && (even.interleave_percent > 100) == overlaps;
}

EvenCuts::EvenCuts(const schedule::SearchOptions& options, const schedule::CostSums& sums, int devices,
                   std::int64_t room_bytes)
    : options_(options), sums_(sums), devices_(devices), room_bytes_(room_bytes), moves_(options, sums, devices) {}

int EvenCuts::lowest(int fused) const { return std::min(options_.plan.first_backward_layer, end(fused)); }

bool EvenCuts::fits(const Cut& cut) const {
  const auto fit = [&](bool backward) {
    return [this, backward](const CutStage& stage) { return sums_.fits(stage.layers, backward, room_bytes_); };
  };
  return std::ranges::all_of(cut.forward, fit(false)) && std::ranges::all_of(cut.backward, fit(true));
}

// The cuts into `stages` stages of even cost; nothing if there is none.
std::vector<Range> EvenCuts::stages_of(Range layers, bool backward, int stages) {
  const auto key = std::make_tuple(backward, layers.first, layers.last);
  auto found = tables_.find(key);
  if (found == tables_.end())
    found = tables_.emplace(key, schedule::partitions_of(sums_, layers, backward, room_bytes_)).first;
  return found->second.cut(stages);
}

std::optional<Cut> EvenCuts::cut_of(const Even& even) {
  const int percent = even.interleave_percent;
  if (percent < 100 || percent > kMostPercent || (percent > 100 && !moves_.overlaps())) return std::nullopt;
  const int fused = even.fused, end = this->end(fused), lowest = this->lowest(fused), back = backward_layers(fused);
  if (fused < 1 || (fused > 1 && fused > options_.max_fused_layers) || end < 0) return std::nullopt;
  const Range fused_layers{end, sums_.layers()};
  if (even.head < 1 || (even.head > 1 && even.head > moves_.most_shared(fused_layers, true))) return std::nullopt;
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
  if (moves_.has_fused()) cut.backward.push_back({fused_layers, even.head});
  if (!fits(cut)) return std::nullopt;
  if (even.backward > 0) {
    const std::vector<Range> stages = stages_of({lowest + even.last, end}, true, even.backward);
    if (stages.empty()) return std::nullopt;
    for (auto layers = stages.rbegin(); layers != stages.rend(); ++layers) cut.backward.push_back({*layers, 1});
    for (int l = lowest + even.last; l-- > lowest;) cut.backward.push_back({{l, l + 1}, 1});
  }
  if (!fits_host(cut)) return std::nullopt;
  return cut;
}

std::vector<int> EvenCuts::stage_numbers(int layers, bool few) const {
  std::set<int> numbers;
  if (!few) numbers.insert(layers);
  for (int number = 1; number <= std::min(layers, few ? kFewNumbers : kEachNumber); ++number) numbers.insert(number);
  for (const int rounds : {1, 2, 3, 4, 6, 8, 12}) {
    if (!few || rounds < 3) numbers.insert(std::min(layers, rounds * devices_));
  }
  return {numbers.begin(), numbers.end()};
}

// Some sizes of the fused stage, up to the most.
std::vector<int> EvenCuts::fused_sizes(const EvenKind& kind) const {
  const int most = moves_.has_fused() ? std::min(kind.most_fused, sums_.layers()) : 1;
  std::set<int> sizes{kind.fewest_fused, most};
  for (const int share : {10, 6, 4, 3, 2}) sizes.insert(most / share);
  sizes.insert(3 * most / 4);
  std::vector<int> possible;
  std::ranges::copy_if(sizes, std::back_inserter(possible),
                       [&](int size) { return size >= kind.fewest_fused && size <= most; });
  return possible;
}

// Synchronous steps fill and drain the devices each time.
std::vector<int> EvenCuts::singles(const EvenKind& kind) const {
  if (options_.rules.asynchronous || kind.most_fused > 1) return {0};
  const std::set<int> numbers{0, devices_ / 2, devices_};
  return {numbers.begin(), numbers.end()};
}

std::vector<Even> EvenCuts::spread(const EvenKind& kind) const {
  std::vector<Even> all;
  const std::vector<int> percents = kind.overlaps ? std::vector<int>{115, 130} : std::vector<int>{100};
  const std::vector<int> ones = singles(kind);
  for (const int fused : fused_sizes(kind)) {
    const bool few = fused > 1;
    for (const int forward : stage_numbers(end(fused), few)) {
      for (const int backward : stage_numbers(backward_layers(fused), few)) {
        for (const int percent : percents) {
          for (const int first : ones) {
            for (const int last : ones) all.push_back({forward, backward, first, last, fused, kind.heads, percent});
          }
        }
      }
    }
  }
  return all;
}

std::vector<Even> EvenCuts::near(const Even& even, const EvenKind& kind) const {
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
  for (const int by : {1, -1, kind.heads - even.head}) add(&Even::head, by);
  for (const int by : {1, -1, 2, -2}) add(&Even::fused, by);
  return result;
}

}  // namespace roundpipe::simulate
