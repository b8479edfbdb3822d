#include <roundpipe/schedule/cut_moves.h>

#include <algorithm>
#include <utility>

#include <roundpipe/schedule/cut.h>

namespace roundpipe::schedule {

namespace {

int below(std::size_t count, std::mt19937& random) { return static_cast<int>(random() % static_cast<unsigned>(count)); }

}  // namespace

std::optional<Cut> crossed(const Cut& forward, const Cut& backward, PlanMode mode) {
  if (mode == PlanMode::kFused && forward.backward.front().layers != backward.backward.front().layers)
    return std::nullopt;
  Cut cut = forward;
  cut.backward = backward.backward;
  return cut;
}

CutMoves::CutMoves(const SearchOptions& options, const CostSums& sums, int devices)
    : options_(options), sums_(sums), devices_(devices) {}

int CutMoves::most_shared(Range layers, bool backward) const {
  return std::min(devices_, most_replicas(layers, backward, sums_, options_.plan));
}

bool CutMoves::fits_host(const Cut& cut) const {
  return options_.max_waiting_bytes == 0 ||
         waiting_bytes(cut, sums_, options_.plan.microbatches) <= options_.max_waiting_bytes;
}

bool CutMoves::allows(const Cut& cut) const {
  if (cut.interleave > (overlaps() ? kMostInterleave : 1)) return false;
  if (has_fused() && cut.backward.front().layers.size() > options_.max_fused_layers) return false;
  const auto keeps = [this](const std::vector<CutStage>& stages, bool backward) {
    return std::ranges::all_of(stages, [&](const CutStage& stage) {
      return stage.replicas <= (options_.replicas ? most_shared(stage.layers, backward) : 1);
    });
  };
  return keeps(cut.forward, false) && keeps(cut.backward, true);
}

void CutMoves::limit_replicas(Cut& cut) const {
  for (CutStage& stage : cut.forward) stage.replicas = std::min(stage.replicas, most_shared(stage.layers, false));
  for (CutStage& stage : cut.backward) stage.replicas = std::min(stage.replicas, most_shared(stage.layers, true));
}

std::optional<Cut> CutMoves::neighbour(const Cut& from, std::mt19937& random) const {
  std::optional<Cut> cut = from;
  for (int moves = 1 + below(3, random); cut && moves > 0; --moves) cut = moved(std::move(*cut), random);
  if (cut) limit_replicas(*cut);
  return cut;
}

std::optional<Cut> CutMoves::moved(Cut cut, std::mt19937& random) const {
  const auto below = [&](std::size_t count) { return roundpipe::schedule::below(count, random); };
  if (overlaps() && below(10) == 0) {
    cut.interleave = std::clamp(cut.interleave + 0.05 * (below(5) - 2), 1.0, kMostInterleave);
    return cut;
  }
  const bool forward = trains() ? below(2) == 0 : true;
  std::vector<CutStage>& stages = forward ? cut.forward : cut.backward;
  // The fused stage keeps its layers.
  const std::size_t fixed = !forward && has_fused() ? 1 : 0;
  if (stages.size() <= fixed) return std::nullopt;
  const std::size_t i = fixed + static_cast<std::size_t>(below(stages.size() - fixed));
  const int move = below(options_.replicas ? 12 : 7);
  if (!forward && options_.plan.single_backward_layers && move < 7) return std::nullopt;
  if (move < 5) {  // a layer to the neighbour
    if (i + 1 >= stages.size()) return std::nullopt;
    CutStage& low = forward ? stages[i] : stages[i + 1];
    CutStage& high = forward ? stages[i + 1] : stages[i];
    const int by = below(2) == 0 ? 1 : -1;
    low.layers.last += by;
    high.layers.first += by;
    if (low.layers.size() < 1 || high.layers.size() < 1) return std::nullopt;
  } else if (move == 5) {  // split
    const Range layers = stages[i].layers;
    if (layers.size() < 2) return std::nullopt;
    const int middle = layers.first + 1 + below(static_cast<std::size_t>(layers.size() - 1));
    const Range lower{layers.first, middle}, upper{middle, layers.last};
    stages[i].layers = forward ? lower : upper;
    stages.insert(stages.begin() + static_cast<std::ptrdiff_t>(i) + 1, {forward ? upper : lower, stages[i].replicas});
  } else if (move == 6) {  // merge
    if (i + 1 >= stages.size()) return std::nullopt;
    Range& layers = stages[i].layers;
    const Range next = stages[i + 1].layers;
    layers = {std::min(layers.first, next.first), std::max(layers.last, next.last)};
    stages.erase(stages.begin() + static_cast<std::ptrdiff_t>(i) + 1);
  } else {  // replicas
    // Replicas pay at the ends of a step (the first forward, the last backward stages) and in the fused stage.
    std::size_t any = static_cast<std::size_t>(below(stages.size()));
    if (below(4) > 0) {
      const std::size_t near = static_cast<std::size_t>(below(std::min<std::size_t>(stages.size(), 10)));
      any = forward ? near : below(6) == 0 ? 0 : stages.size() - 1 - near;
    }
    const int most = most_shared(stages[any].layers, !forward);
    stages[any].replicas = 1 + below(static_cast<std::size_t>(most));
  }
  return cut;
}

}  // namespace roundpipe::schedule
