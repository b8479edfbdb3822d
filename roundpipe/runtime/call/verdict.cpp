#include <roundpipe/runtime/call/verdict.h>

#include <algorithm>
#include <optional>

#include <roundpipe/core/error.h>

namespace roundpipe::runtime {

namespace {

using Results = std::map<JobResult, uint32_t>;

// What one device has computed.
struct Evidence {
  std::vector<const Results*> runs;
  bool repeats() const {
    return std::ranges::all_of(runs, [&](const Results* run) { return *run == *runs.front(); });
  }
};

std::string list(const std::vector<CheckedDevice>& devices, const std::vector<size_t>& places) {
  std::string names;
  for (const size_t place : places) names += concat(names.empty() ? "" : ", ", devices[place].name);
  return names;
}

// The results that more devices have than any other results; none if there are no such.
std::optional<Results> of_most(const std::vector<Evidence>& evidence, const std::vector<size_t>& devices) {
  std::optional<Results> best;
  size_t votes = 0;
  bool tied = false;
  for (const size_t device : devices) {
    const Results& own = *evidence[device].runs.front();
    const auto same = static_cast<size_t>(
        std::ranges::count_if(devices, [&](size_t other) { return *evidence[other].runs.front() == own; }));
    if (same > votes) {
      votes = same;
      best = own;
      tied = false;
    } else if (same == votes && own != *best) {
      tied = true;
    }
  }
  return tied ? std::nullopt : best;
}

}  // namespace

bool agree(const std::vector<CheckedRun>& runs) {
  return std::ranges::all_of(runs, [&](const CheckedRun& run) { return run.results == runs.front().results; });
}

Verdict judge(const std::vector<CheckedDevice>& devices, const std::vector<CheckedRun>& runs) {
  std::vector<Evidence> evidence(devices.size());
  for (const CheckedRun& run : runs) evidence[run.device].runs.push_back(&run.results);
  std::vector<size_t> changing, repeating, other;
  for (size_t i = 0; i < devices.size(); ++i) {
    if (devices[i].changes_copies) changing.push_back(i);
    if (evidence[i].runs.empty()) continue;
    (evidence[i].repeats() ? repeating : other).push_back(i);
  }
  if (!changing.empty()) return {changing, "bytes that were sent to it and back came back changed"};
  const bool any_twice =
      std::ranges::any_of(repeating, [&](size_t device) { return evidence[device].runs.size() > 1; });
  if (!other.empty() && !any_twice) {
    return {{},
            concat("none of ", list(devices, other),
                   " gives the same bits twice; expected layers and a loss that are deterministic "
                   "(torch.use_deterministic_algorithms(True) finds those that are not), unless all of these devices "
                   "are wrong")};
  }
  constexpr auto kNotTwice = "it does not give the same bits twice, and other devices do";
  const std::optional<Results> right = of_most(evidence, repeating);
  if (!right && !other.empty()) return {other, kNotTwice};
  if (!right) {
    return {{},
            concat("each of ", list(devices, repeating),
                   " repeats its own bits, so this does not tell which of them is wrong; compare them with plain "
                   "PyTorch by `roundpipe selftest`")};
  }
  Verdict verdict;
  for (const size_t device : repeating) {
    if (*evidence[device].runs.front() != *right) verdict.wrong.push_back(device);
  }
  verdict.reason = other.empty() ? "its bits differ from those of other devices, which agree" : kNotTwice;
  verdict.wrong.insert(verdict.wrong.end(), other.begin(), other.end());
  return verdict;
}

}  // namespace roundpipe::runtime
