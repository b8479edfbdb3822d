#include <roundpipe/simulate/memory_simulator.h>

#include <algorithm>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>

#include <roundpipe/schedule/gradient_groups.h>

namespace roundpipe::simulate {

using schedule::Job;
using schedule::Phase;
using schedule::Plan;
using std::int64_t;

namespace {

constexpr int64_t kSumElement_bytes = 4;  // 16-bit gradients are summed in fp32

bool has_wider_sums(const ParameterSize& parameter) { return parameter.element_bytes < kSumElement_bytes; }

int64_t sum_bytes(const ParameterSize& parameter) {
  return parameter.elements * std::max(parameter.element_bytes, kSumElement_bytes);
}

void check(const StepSizes& sizes, std::size_t layers) {
  if (sizes.layers.size() == layers && sizes.footprints.size() == layers) return;
  throw std::invalid_argument("[memory] got " + std::to_string(sizes.layers.size()) + " layers and " +
                              std::to_string(sizes.footprints.size()) + " footprints, expected " +
                              std::to_string(layers) + " of each");
}

template <typename T>
std::span<const T> of_stage(const std::vector<T>& layers, const Job& job) {
  return std::span(layers).subspan(static_cast<std::size_t>(job.layers.first),
                                   static_cast<std::size_t>(job.layers.size()));
}

// The most that the layers of a stage hold for one microbatch, beyond its inputs.
int64_t work_bytes(std::span<const LayerFootprint> stage, bool trains, RecomputeGrain grain) {
  int64_t most = 0;
  int64_t below = 0;  // held by the layers below
  for (const LayerFootprint& layer : stage) {
    most = std::max({most, below + layer.forward, trains ? below + layer.backward : 0});
    below = trains ? below + kept_bytes(layer, grain) : layer.outputs;
  }
  return most;
}

// With keys that differ between layers, but for blocks that they share.
std::vector<FrozenBlock> frozen_of(const StepSizes& sizes, int layer) {
  constexpr std::uint64_t kOfLayers = std::uint64_t{1} << 63;
  std::vector<FrozenBlock> blocks = sizes.layers[static_cast<std::size_t>(layer)].frozen;
  for (FrozenBlock& block : blocks) {
    if (block.key == LayerBytes::kOwn) block.key = kOfLayers + static_cast<std::uint64_t>(layer);
  }
  return blocks;
}

// One job on its device.
struct Visit {
  Visit(const Job& job, const Plan& plan, const StepSizes& sizes, std::size_t number)
      : microbatches(job.microbatches.size()), step(number) {
    const bool trains = job.phase != Phase::kForward;
    const schedule::GradientGroups groups(plan.microbatches, sizes.gradient_groups);
    const bool has_several = groups.groups_of(job.microbatches).size() > 1;
    const bool is_part = microbatches < plan.microbatches;
    const auto stage = of_stage(sizes.footprints, job);
    for (int l = job.layers.first; l < job.layers.last; ++l) {
      const LayerBytes& layer = sizes.layers[static_cast<std::size_t>(l)];
      weights += layer.weights;
      const bool joins = !is_part && layer.joined.holds(l, job.layers.first, job.layers.last);
      for (const FrozenBlock& block : frozen_of(sizes, l)) of_weights.frozen.push_back(block);
      if (!trains) continue;
      // Of several groups, one is being summed while those before it are kept, or on their way.
      sums += layer.sums * (has_several ? 2 : 1);
      leaving += is_part ? layer.sums : layer.gradients;
      leaving -= joins ? layer.joined.saved : 0;
    }
    of_weights.slot_bytes = weights;
    values = stage.front().inputs;
    if (job.phase == Phase::kFused) values += sizes.label_bytes;
    if (job.phase == Phase::kBackward) values += stage.back().output_gradients;
    work = work_bytes(stage, trains, sizes.grain);
    if (trains && !is_part)
      pass_layers(job.layers, of_stage(sizes.layers, job), stage, sizes.grain, has_several ? 2 : 1);
  }

  // The most that is staged of this job's microbatches and, towards its end, of the next job's.
  int64_t staged_bytes(const Visit* after) const {
    int64_t most = 0;
    for (int own = 1; own <= std::min(kStagedMicrobatches, microbatches); ++own) {
      const int coming = after != nullptr ? std::min(kStagedMicrobatches - own, after->microbatches) : 0;
      most = std::max(most, own * values + (coming > 0 ? coming * after->values : 0));
    }
    return most;
  }

  // Whether the next job's weights, with its first values, fit beside this job.
  bool has_room_for(const Visit& after, int64_t cap_bytes) const {
    return fits_cap(weights + sums + staged_bytes(&after) + work + after.weights, cap_bytes);
  }

  // Sets what there is when the backward of the last microbatch has passed a layer whose sum is being rounded: the sums
  // of the layers below it, what layers below keep, and the rounded sums of those above, if none has left yet.
  // Sums that are joined stay until the first layer that has them.
  void pass_layers(schedule::Range numbers, std::span<const LayerBytes> layers, std::span<const LayerFootprint> stage,
                   RecomputeGrain grain, int sums_of_each) {
    int64_t sums_left = sums, rounded_above = 0, kept = 0;
    for (const LayerFootprint& layer : stage) kept += kept_bytes(layer, grain);
    for (std::size_t l = layers.size(); l-- > 0;) {
      kept -= kept_bytes(stage[l], grain);
      const bool joins = layers[l].joined.holds(numbers.first + static_cast<int>(l), numbers.first, numbers.last);
      const int64_t rounded = layers[l].rounded + (joins ? layers[l].joined.rounded : 0);
      rounded_above += rounded;
      const int64_t gradient = l > 0 ? stage[l].inputs : 0;  // of the stage's own inputs: on its way out
      if (rounded > 0 && sums_left + rounded_above + kept + gradient > passing_sums + passing_work) {
        passing_sums = sums_left + rounded_above;
        passing_work = kept + gradient;
      }
      sums_left -= layers[l].rounded > 0 ? layers[l].sums * sums_of_each : 0;
    }
  }

  int microbatches;
  std::size_t step;
  WeightVisit of_weights;
  int64_t weights = 0, sums = 0, leaving = 0, values = 0, work = 0;
  int64_t passing_sums = 0, passing_work = 0;
};

// The highest peak of one device that makes these visits.
DeviceMemory peak_of(const std::vector<Visit>& visits, const DeviceRules& rules) {
  const auto next_of = [&](std::size_t i) -> const Visit* {
    const bool is_prefetched = i + 1 < visits.size() && visits[i].has_room_for(visits[i + 1], rules.cap_bytes);
    return is_prefetched ? &visits[i + 1] : nullptr;
  };
  // Weights share one arena, large enough for any two consecutive jobs that fit beside each other.
  int64_t arena = 0;
  for (std::size_t i = 0; i < visits.size(); ++i) {
    const Visit* const next = next_of(i);
    arena = std::max(arena, visits[i].weights + (next != nullptr ? next->weights : 0));
  }
  DeviceMemory most;
  for (std::size_t i = 0; i < visits.size(); ++i) {
    const Visit& visit = visits[i];
    const Visit* const next = next_of(i);
    const auto fits_with = [&](const Visit* after) {
      return fits_cap(arena + visit.sums + visit.staged_bytes(after) + visit.work, rules.cap_bytes);
    };
    const bool fits = fits_with(nullptr);
    const int64_t weights = fits ? arena : visit.weights;
    // The next job waits for this one to end if it finds no room beside the whole arena.
    const int64_t values = visit.staged_bytes(fits && !fits_with(next) ? nullptr : next);
    const int64_t leaving = i > 0 && !rules.waits ? visits[i - 1].leaving : 0;
    for (const DeviceMemory& moment :
         {DeviceMemory{weights, visit.sums + leaving, values, 0}, DeviceMemory{weights, visit.sums, values, visit.work},
          DeviceMemory{weights, visit.passing_sums, values, visit.passing_work}}) {
      if (moment.total() > most.total()) most = moment;
    }
  }
  // The engine's arena has room for each two that leave so much for the rest, see runtime::DeviceRoom. There, the first
  // job of a step may follow its last one.
  const auto add_pair = [&](const Visit& visit, const Visit& next) {
    const int64_t pair = visit.weights + next.weights;
    if (fits_cap(pair + most.beside_weights(), rules.cap_bytes)) most.weights = std::max(most.weights, pair);
  };
  for (std::size_t i = 0; i < visits.size(); ++i) {
    if (i + 1 < visits.size()) add_pair(visits[i], visits[i + 1]);
    if (i + 1 == visits.size() || visits[i + 1].step != visits[i].step)
      add_pair(visits[i], *std::ranges::find(visits, visits[i].step, &Visit::step));
  }
  return most;
}

// The same with the frozen weights that stay beside `work_bytes`.
DeviceMemory peak_with_residents(std::vector<Visit> visits, const StepSizes& sizes, const DeviceRules& rules,
                                 int64_t work_bytes) {
  std::vector<WeightVisit> of_weights;
  std::vector<FrozenBlock> candidates;
  for (const Visit& visit : visits) {
    of_weights.push_back(visit.of_weights);
    candidates.insert(candidates.end(), visit.of_weights.frozen.begin(), visit.of_weights.frozen.end());
  }
  for (int l = 0; l < static_cast<int>(sizes.layers.size()); ++l) {
    const std::vector<FrozenBlock> blocks = frozen_of(sizes, l);
    candidates.insert(candidates.end(), blocks.begin(), blocks.end());
  }
  const std::set<std::uint64_t> residents =
      choose_residents(of_weights, candidates, {rules.cap_bytes, work_bytes, rules.most_resident_bytes});
  if (visits.empty() || residents.empty()) return peak_of(visits, rules);
  int64_t bytes = 0;
  std::set<std::uint64_t> counted;
  for (const FrozenBlock& block : candidates) {
    if (residents.contains(block.key) && counted.insert(block.key).second) bytes += block.bytes;
  }
  for (Visit& visit : visits) visit.weights = slot_bytes(visit.of_weights, residents);
  DeviceMemory peak = peak_of(visits, {rules.cap_bytes - bytes, rules.waits});
  peak.resident = bytes;
  return peak;
}

// Of each device, without resident weights.
std::vector<DeviceMemory> peaks_of(const std::vector<std::vector<Visit>>& visits, std::span<const DeviceRules> rules) {
  std::vector<DeviceMemory> peaks;
  for (std::size_t device = 0; device < visits.size(); ++device)
    peaks.push_back(peak_of(visits[device], rules[device]));
  return peaks;
}

bool less_in_total(const DeviceMemory& a, const DeviceMemory& b) { return a.total() < b.total(); }

// Of each device.
std::vector<std::vector<Visit>> visits_of(std::span<const Plan> plans, const StepSizes& sizes) {
  std::vector<std::vector<Visit>> visits;
  for (std::size_t step = 0; step < plans.size(); ++step) {
    const Plan& plan = plans[step];
    check(sizes, static_cast<std::size_t>(plan.layers));
    visits.resize(std::max(visits.size(), static_cast<std::size_t>(plan.devices)));
    for (const Job& job : plan.jobs) visits[static_cast<std::size_t>(job.device)].emplace_back(job, plan, sizes, step);
  }
  return visits;
}

}  // namespace

LayerBytes layer_bytes(std::span<const ParameterSize> parameters) {
  LayerBytes layer;
  int64_t frozen = 0;
  for (const ParameterSize& parameter : parameters) {
    layer.weights += parameter.bytes();
    if (!parameter.trained) {
      frozen += parameter.bytes();
      continue;
    }
    const GradientBytes gradients =
        gradient_bytes(parameter.bytes(), sum_bytes(parameter), has_wider_sums(parameter), parameter.tied);
    layer.gradients += gradients.sent;
    layer.sums += gradients.sums;
    layer.rounded += gradients.rounded;
  }
  if (frozen > 0) layer.frozen.push_back({LayerBytes::kOwn, frozen});
  return layer;
}

LayerFootprint scaled(const LayerFootprint& footprint, int64_t rows, int64_t measured_rows) {
  const auto of_rows = [&](int64_t bytes) { return (bytes * rows + measured_rows - 1) / measured_rows; };
  return {of_rows(footprint.inputs),  of_rows(footprint.outputs), of_rows(footprint.output_gradients),
          of_rows(footprint.forward), of_rows(footprint.saved),   of_rows(footprint.backward)};
}

int64_t kept_bytes(const LayerFootprint& footprint, RecomputeGrain grain) {
  return grain == RecomputeGrain::kStage ? footprint.saved : footprint.outputs;
}

namespace {

std::vector<DeviceMemory> predict_each(std::span<const Plan> plans, const StepSizes& sizes,
                                       const std::function<DeviceRules(std::size_t device)>& rules_of) {
  const std::vector<std::vector<Visit>> visits = visits_of(plans, sizes);
  std::vector<DeviceRules> rules;
  for (std::size_t device = 0; device < visits.size(); ++device) rules.push_back(rules_of(device));
  std::vector<DeviceMemory> peaks = peaks_of(visits, rules);
  const bool has_frozen =
      std::ranges::any_of(sizes.layers, [](const LayerBytes& layer) { return !layer.frozen.empty(); });
  if (!has_frozen || peaks.empty()) return peaks;
  const int64_t work_bytes = std::ranges::max_element(peaks, less_in_total)->beside_weights();
  for (std::size_t device = 0; device < visits.size(); ++device)
    peaks[device] = peak_with_residents(visits[device], sizes, rules[device], work_bytes);
  return peaks;
}

}  // namespace

DeviceMemory predict_device(std::span<const Plan> plans, const StepSizes& sizes, const DeviceRules& rules) {
  const std::vector<DeviceMemory> peaks = predict_each(plans, sizes, [&](std::size_t) { return rules; });
  return peaks.empty() ? DeviceMemory{} : *std::ranges::max_element(peaks, less_in_total);
}

std::vector<DeviceMemory> predict_devices(std::span<const Plan> plans, const StepSizes& sizes,
                                          std::span<const int64_t> cap_bytes) {
  return predict_each(plans, sizes, [&](std::size_t device) { return DeviceRules{cap_bytes[device], false}; });
}

int64_t stage_limit_bytes(const StepSizes& sizes, int64_t budget_bytes) {
  check(sizes, std::max<std::size_t>(1, sizes.layers.size()));
  const auto most = [](const auto& layers, auto bytes_of) {
    return bytes_of(*std::ranges::max_element(layers, {}, bytes_of));
  };
  const int64_t weights = most(sizes.layers, [](const LayerBytes& layer) { return layer.weights; });
  const int64_t values =
      most(sizes.footprints, [](const LayerFootprint& layer) { return layer.inputs + layer.output_gradients; });
  const int64_t beyond = most(sizes.footprints, [&](const LayerFootprint& layer) {
    return std::max(layer.forward, layer.backward) - kept_bytes(layer, sizes.grain);
  });
  const int64_t others = weights + kStagedMicrobatches * values + sizes.label_bytes + beyond;
  return std::max<int64_t>(1, budget_bytes - others);
}

int64_t largest_stage_bytes(std::span<const Plan> plans, const StepSizes& sizes) {
  int64_t largest = 0;
  for (const Plan& plan : plans) {
    check(sizes, static_cast<std::size_t>(plan.layers));
    const bool trains = std::ranges::any_of(plan.jobs, [](const Job& job) { return job.phase != Phase::kForward; });
    for (const Job& job : plan.jobs) {
      if (trains && job.phase == Phase::kForward) continue;
      int64_t bytes = 0;
      for (const LayerBytes& layer : of_stage(sizes.layers, job)) bytes += layer.weights + layer.gradients;
      for (const LayerFootprint& layer : of_stage(sizes.footprints, job)) bytes += kept_bytes(layer, sizes.grain);
      largest = std::max(largest, bytes);
    }
  }
  return largest;
}

int64_t waiting_on_host(const Plan& plan, std::span<const LayerFootprint> footprints, int microbatches) {
  std::vector<bool> kept(footprints.size());
  kept.at(0) = true;
  for (const Job& job : plan.jobs) {
    if (job.phase != Phase::kForward) kept.at(static_cast<std::size_t>(job.layers.first)) = true;
  }
  int64_t bytes = 0;
  for (std::size_t l = 0; l < kept.size(); ++l) bytes += kept[l] ? microbatches * footprints[l].inputs : 0;
  return bytes;
}

int64_t partial_sum_bytes(const Plan& plan, const StepSizes& sizes) {
  check(sizes, static_cast<std::size_t>(plan.layers));
  const std::vector<int> parts = schedule::gradient_parts(plan, sizes.gradient_groups);
  int64_t bytes = 0;
  for (std::size_t l = 0; l < parts.size(); ++l) {
    if (parts[l] > 1) bytes += sizes.layers[l].sums * partial_sums(parts[l], sizes.layers[l].rounded > 0);
  }
  return bytes;
}

HostMemory predict_host(std::span<const std::vector<ParameterSize>> blocks) {
  HostMemory host;
  for (const std::vector<ParameterSize>& block : blocks) {
    int64_t size = 0;
    bool trained = false;
    for (const ParameterSize& parameter : block) {
      size += parameter.bytes();
      if (!parameter.trained) continue;
      trained = true;
      host.masters += parameter.elements * parameter.master_bytes;
      host.moments += parameter.moment_bytes;
    }
    host.weights += size;
    if (trained) host.gradients += size;
  }
  return host;
}

int64_t tied_sum_bytes(const ParameterSize& parameter, int layers) {
  if (!parameter.trained || layers < 2) return 0;
  return sum_bytes(parameter) * partial_sums(layers, has_wider_sums(parameter));
}

}  // namespace roundpipe::simulate
