#include <roundpipe/training/microbatch_choice.h>

#include <algorithm>
#include <memory>
#include <vector>

#include <roundpipe/core/error.h>
#include <roundpipe/runtime/call/run_options.h>
#include <roundpipe/runtime/engine.h>
#include <roundpipe/runtime/pipeline.h>

namespace roundpipe {

namespace {

// More microbatches fill the devices better, and each of them less well: the fewest win among those whose predicted
// step is at most this much longer than the shortest.
constexpr int kTolerancePercent = 2;
constexpr int kMostForEachDevice = 8;

// Every number up to 16, then steps of about an eighth.
std::vector<int> candidates(int least, int most) {
  std::vector<int> numbers = {least};
  while (numbers.back() < most) numbers.push_back(std::min(most, numbers.back() + std::max(1, numbers.back() / 8)));
  return numbers;
}

}  // namespace

MicrobatchChoice choose_microbatches(const runtime::Pipeline& pipeline, int most, int groups,
                                     const std::function<bool(int)>& fits) {
  const std::shared_ptr<runtime::Engine> engine = runtime::Engine::current();
  const runtime::ModelPlanner& planner = pipeline.planner();
  const int devices = engine->size();
  const bool measured = planner.knows_costs() && !planner.steps().empty();
  const int now = measured ? planner.steps().back().microbatches : 1;
  const int least = measured ? 1 : std::min(most, default_microbatches(devices));
  const std::vector<int> numbers = candidates(least, std::min(most, kMostForEachDevice * devices));
  std::vector<double> predicted_ms;
  for (const int number : numbers)
    predicted_ms.push_back(planner.predicted_ms(*engine, number, groups, static_cast<double>(now) / number));
  const double enough_ms =
      (1 + kTolerancePercent / 100.0) * *std::min_element(predicted_ms.begin(), predicted_ms.end());
  size_t first = 0;
  while (predicted_ms[first] > enough_ms) ++first;
  const int wanted = numbers[first];

  // Smaller microbatches may fit where larger ones do not, even if the devices do not need them.
  const std::vector<int> larger = candidates(wanted, most);
  const auto fitting = std::find_if(larger.begin(), larger.end(), [&](int number) { return fits(number); });
  const int count = fitting == larger.end() ? larger.back() : *fitting;

  const std::string costs =
      concat(measured ? "measured" : "estimated", " costs, ", devices, devices > 1 ? " devices" : " device");
  if (count == wanted && wanted == most) return {count, costs + ": as many as the batch allows"};
  std::string reason = concat(costs, ": more would shorten the predicted step by less than ", kTolerancePercent, "%");
  if (count != wanted) reason += concat(" from ", wanted, " on, but fewer than ", count, " do not fit in memory");
  return {count, reason};
}

}  // namespace roundpipe
