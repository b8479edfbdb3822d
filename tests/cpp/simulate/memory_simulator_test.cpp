#include <roundpipe/schedule/search.h>
#include <roundpipe/simulate/memory_simulator.h>

#include <algorithm>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/schedule/gradient_groups.h>

using namespace roundpipe::schedule;
using namespace roundpipe::simulate;
using roundpipe::RecomputeGrain;
using std::int64_t;

namespace {

// Memory that is taken and given back piece by piece.
class Ledger {
 public:
  void take(int64_t bytes) { peak_ = std::max(peak_, held_ += bytes); }
  void give(int64_t bytes) { held_ -= bytes; }
  void use(int64_t bytes) {
    take(bytes);
    give(bytes);
  }
  int64_t peak() const { return peak_; }

 private:
  int64_t held_ = 0;
  int64_t peak_ = 0;
};

// Runs the jobs of one device, step by step, one layer of one microbatch after the other.
class Replay {
 public:
  Replay(const std::vector<std::vector<Job>>& steps, int microbatches, const StepSizes& sizes, DeviceRules rules)
      : microbatches_(microbatches), sizes_(sizes), rules_(rules) {
    for (const std::vector<Job>& jobs : steps) {
      if (jobs.empty()) continue;
      jobs_.insert(jobs_.end(), jobs.begin(), jobs.end());
      pairs_.emplace_back(jobs.back(), jobs.front());  // of the next step, as far as the engine knows
    }
    for (std::size_t i = 0; i + 1 < jobs_.size(); ++i) pairs_.emplace_back(jobs_[i], jobs_[i + 1]);
  }

  int64_t peak() const {
    int64_t arena = 0;
    for (std::size_t i = 0; i < jobs_.size(); ++i) {
      int64_t held = own(jobs_[i], &LayerBytes::weights);
      if (is_next_prefetched(i)) held += own(jobs_[i + 1], &LayerBytes::weights);
      arena = std::max(arena, held);
    }
    int64_t most = 0, weights = 0;
    for (std::size_t i = 0; i < jobs_.size(); ++i) {
      const int64_t peak = peak_of_job(i, arena);
      if (peak > most) weights = shares_arena(jobs_[i], arena) ? arena : own(jobs_[i], &LayerBytes::weights);
      most = std::max(most, peak);
    }
    // The engine asks of two jobs whether they leave as much as the fullest moment takes beside its weights.
    const int64_t besides = most - weights;
    for (const auto& [job, next] : pairs_) {
      const int64_t two = own(job, &LayerBytes::weights) + own(next, &LayerBytes::weights);
      if (rules_.cap_bytes == 0 || two + besides <= rules_.cap_bytes) weights = std::max(weights, two);
    }
    return weights + besides;
  }

 private:
  int64_t own(const Job& job, int64_t LayerBytes::* bytes) const {
    int64_t sum = 0;
    if (job.phase == Phase::kForward && bytes != &LayerBytes::weights) return sum;
    for (int l = job.layers.first; l < job.layers.last; ++l) sum += layer(l).*bytes;
    return sum;
  }
  const LayerBytes& layer(int l) const { return sizes_.layers[static_cast<std::size_t>(l)]; }
  const LayerFootprint& footprint(int l) const { return sizes_.footprints[static_cast<std::size_t>(l)]; }

  bool is_part(const Job& job) const { return job.microbatches.size() < microbatches_; }
  int64_t sums(const Job& job) const {
    const GradientGroups groups(microbatches_, sizes_.gradient_groups);
    std::set<int> held;
    for (int m = job.microbatches.first; m < job.microbatches.last; ++m) held.insert(groups.group_of(m));
    return (held.size() > 1 ? 2 : 1) * own(job, &LayerBytes::sums);
  }
  int64_t leaving(const Job& job) const { return own(job, is_part(job) ? &LayerBytes::sums : &LayerBytes::gradients); }

  int64_t values_of_microbatch(const Job& job) const {
    int64_t bytes = footprint(job.layers.first).inputs;
    if (job.phase == Phase::kFused) bytes += sizes_.label_bytes;
    if (job.phase == Phase::kBackward) bytes += footprint(job.layers.last - 1).output_gradients;
    return bytes;
  }

  // The running microbatch and two more, first of this job, then of the next.
  int64_t staged(const Job& job, const Job* next) const {
    int64_t most = 0;
    for (int running = 0; running < job.microbatches.size(); ++running) {
      std::vector<int64_t> coming(static_cast<std::size_t>(job.microbatches.size() - running),
                                  values_of_microbatch(job));
      for (int m = 0; next != nullptr && m < next->microbatches.size(); ++m) {
        coming.push_back(values_of_microbatch(*next));
      }
      Ledger ledger;
      for (std::size_t m = 0; m < std::min<std::size_t>(3, coming.size()); ++m) ledger.take(coming[m]);
      most = std::max(most, ledger.peak());
    }
    return most;
  }

  int64_t work(const Job& job) const {
    Ledger ledger;
    const bool by_stage = sizes_.grain == RecomputeGrain::kStage;
    if (job.phase == Phase::kForward) {
      for (int l = job.layers.first; l < job.layers.last; ++l) {
        ledger.use(footprint(l).forward);
        if (l > job.layers.first) ledger.give(footprint(l - 1).outputs);
        ledger.take(footprint(l).outputs);
      }
      return ledger.peak();
    }
    for (int l = job.layers.first; l < job.layers.last; ++l) {
      ledger.use(footprint(l).forward);
      ledger.take(by_stage ? footprint(l).saved : footprint(l).outputs);
    }
    for (int l = job.layers.last - 1; l >= job.layers.first; --l) {
      ledger.give(by_stage ? footprint(l).saved : footprint(l).outputs);
      if (!by_stage) ledger.use(footprint(l).forward);
      ledger.use(footprint(l).backward);
    }
    return ledger.peak();
  }

  bool is_next_prefetched(std::size_t i) const {
    if (i + 1 == jobs_.size()) return false;
    const Job& job = jobs_[i];
    const Job& next = jobs_[i + 1];
    const int64_t held =
        own(job, &LayerBytes::weights) + own(next, &LayerBytes::weights) + sums(job) + staged(job, &next) + work(job);
    return rules_.cap_bytes == 0 || held <= rules_.cap_bytes;
  }

  bool shares_arena(const Job& job, int64_t arena) const {
    return rules_.cap_bytes == 0 || arena + sums(job) + work(job) + staged(job, nullptr) <= rules_.cap_bytes;
  }

  int64_t peak_of_job(std::size_t i, int64_t arena) const {
    const Job& job = jobs_[i];
    const Job* const next = is_next_prefetched(i) ? &jobs_[i + 1] : nullptr;
    const bool shares = shares_arena(job, arena);
    const int64_t besides = arena + sums(job) + work(job);
    const bool next_waits = shares && rules_.cap_bytes != 0 && besides + staged(job, next) > rules_.cap_bytes;
    Ledger ledger;
    ledger.take(shares ? arena : own(job, &LayerBytes::weights));
    ledger.take(staged(job, next_waits ? nullptr : next));
    ledger.take(sums(job));
    if (i > 0 && !rules_.waits) ledger.use(leaving(jobs_[i - 1]));
    ledger.use(work(job));
    if (!is_part(job) && job.phase != Phase::kForward) pass(job, ledger);
    return ledger.peak();
  }

  // The last backward: what layers keep goes from the last one down, and each sum leaves as a rounded copy.
  void pass(const Job& job, Ledger& ledger) const {
    const auto kept = [&](int l) {
      return sizes_.grain == RecomputeGrain::kStage ? footprint(l).saved : footprint(l).outputs;
    };
    const int64_t sums_of_each = own(job, &LayerBytes::sums) == sums(job) ? 1 : 2;
    for (int l = job.layers.first; l < job.layers.last; ++l) ledger.take(kept(l));
    for (int l = job.layers.last - 1; l >= job.layers.first; --l) {
      ledger.give(kept(l));
      if (layer(l).rounded == 0) continue;
      const int64_t gradient = l > job.layers.first ? footprint(l).inputs : 0;
      ledger.take(gradient);
      ledger.take(layer(l).rounded);
      ledger.give(gradient);
      ledger.give(sums_of_each * layer(l).sums);
    }
  }

  std::vector<Job> jobs_;
  std::vector<std::pair<Job, Job>> pairs_;
  int microbatches_;
  const StepSizes& sizes_;
  DeviceRules rules_;
};

int64_t replayed(const std::vector<Plan>& plans, const StepSizes& sizes, DeviceRules rules) {
  int64_t most = 0;
  for (int device = 0; device < plans.front().devices; ++device) {
    std::vector<std::vector<Job>> steps;
    for (const Plan& plan : plans) {
      std::ranges::copy_if(plan.jobs, std::back_inserter(steps.emplace_back()),
                           [&](const Job& job) { return job.device == device; });
    }
    most = std::max(most, Replay(steps, plans.front().microbatches, sizes, rules).peak());
  }
  return most;
}

class Dice {
 public:
  explicit Dice(unsigned seed) : random_(seed) {}
  int from_1_to(int most) { return 1 + static_cast<int>(random_() % static_cast<unsigned>(most)); }

  StepSizes sizes(int layers) {
    StepSizes sizes;
    for (int l = 0; l < layers; ++l) {
      const int64_t gradients = from_1_to(500);
      sizes.layers.push_back({from_1_to(1000), gradients, 2 * gradients, from_1_to(2) == 1 ? gradients : 0});
      const int64_t outputs = from_1_to(100), saved = outputs + from_1_to(300), forward = saved + from_1_to(100);
      sizes.footprints.push_back({from_1_to(100), outputs, from_1_to(100), forward, saved, saved + from_1_to(300)});
    }
    sizes.grain = from_1_to(2) == 1 ? RecomputeGrain::kStage : RecomputeGrain::kLayer;
    sizes.label_bytes = from_1_to(50);
    return sizes;
  }

  Range part_of(int size) {
    const int first = from_1_to(size) - 1;
    return {first, first + from_1_to(size - first)};
  }

  std::vector<Plan> plans(int layers) {
    const int devices = from_1_to(3), microbatches = from_1_to(6);
    std::vector<Plan> plans;
    for (int step = from_1_to(3); step > 0; --step) {
      Plan& plan = plans.emplace_back(Plan{layers, microbatches, devices, 0, {}});
      for (int job = from_1_to(8); job > 0; --job) {
        const Phase phase = std::vector{Phase::kForward, Phase::kFused, Phase::kBackward}.at(
            static_cast<std::size_t>(from_1_to(3) - 1));
        plan.jobs.push_back({phase, part_of(layers), part_of(microbatches), from_1_to(devices) - 1});
      }
    }
    return plans;
  }

 private:
  std::mt19937 random_;
};

// Forward of the first layer, the second one fused, backward of the first: all on one device.
Plan two_layers(int microbatches) {
  const Range all{0, microbatches};
  return {2,
          microbatches,
          1,
          0,
          {{Phase::kForward, {0, 1}, all, 0}, {Phase::kFused, {1, 2}, all, 0}, {Phase::kBackward, {0, 1}, all, 0}}};
}

StepSizes two_sizes(RecomputeGrain grain = RecomputeGrain::kStage) {
  return {{{1000, 500, 500, 0}, {3000, 1500, 3000, 1500}},
          {{10, 20, 20, 80, 60, 90}, {20, 4, 4, 200, 150, 260}},
          grain,
          /*label_bytes=*/5};
}

}  // namespace

TEST_CASE("memory simulator: a step of two layers, in numbers") {
  const std::vector plans{two_layers(4)};
  // The end of the fused job: its weights and the next job's, sums with the rounded copy, three of 20 + 5 staged. The
  // backward's values are larger (10 + 20), so two of the next job's beside one of its own count.
  const DeviceMemory peak = predict_device(plans, two_sizes(), {});
  CHECK(peak.weights == 4000);
  CHECK(peak.gradients == 4500);
  CHECK(peak.values == 25 + 2 * 30);
  CHECK(peak.work == 0);
  CHECK(peak.total() == replayed(plans, two_sizes(), {}));
}

TEST_CASE("memory simulator: under a cap, the next job's weights come later") {
  const std::vector plans{two_layers(1)};
  // Running: 3000 of weights, 3000 of sums, 25 of values, 260 of work; the next job's 1000 do not fit beside them.
  const DeviceMemory tight = predict_device(plans, two_sizes(), {.cap_bytes = 7000});
  CHECK(tight.weights == 3000);
  CHECK(tight.values == 25);
  const DeviceMemory ample = predict_device(plans, two_sizes(), {.cap_bytes = 8000});
  CHECK(ample.weights == 4000);
}

TEST_CASE("memory simulator: the first job of a step may follow its last one, wherever its device is in the next") {
  const auto one_job = [](int device) { return Plan{2, 4, 3, 0, {{Phase::kFused, {0, 2}, {0, 4}, device}}}; };
  for (const int steps : {1, 3}) {
    std::vector<Plan> plans;
    for (int step = 0; step < steps; ++step) plans.push_back(one_job(step));
    CHECK(predict_device(plans, two_sizes(), {}).weights == 2 * 4000);
  }
}

TEST_CASE("memory simulator: gradients that leave count while the next job begins") {
  const std::vector plans{two_layers(1), two_layers(1)};
  StepSizes sizes = two_sizes();
  for (LayerBytes& layer : sizes.layers) layer.rounded = 0;
  sizes.layers[1].gradients = 9000;
  CHECK(predict_device(plans, sizes, {}).gradients == 500 + 9000);
  CHECK(predict_device(plans, sizes, {.waits = true}).gradients == 3000);
}

TEST_CASE("memory simulator: the peak is that of a replay, layer by layer") {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    CAPTURE(seed);
    Dice dice(seed);
    const int layers = dice.from_1_to(6);
    StepSizes sizes = dice.sizes(layers);
    sizes.gradient_groups = dice.from_1_to(4);
    const std::vector<Plan> plans = dice.plans(layers);
    for (const int64_t cap_bytes : {0, dice.from_1_to(5000), dice.from_1_to(15000)}) {
      for (const bool waits : {false, true}) {
        const DeviceRules rules{cap_bytes, waits};
        CHECK(predict_device(plans, sizes, rules).total() == replayed(plans, sizes, rules));
      }
    }
  }
}

TEST_CASE("memory simulator: sizes that do not match the plan are refused") {
  const std::vector plans{two_layers(1)};
  StepSizes sizes = two_sizes();
  sizes.footprints.pop_back();
  CHECK_THROWS_AS(predict_device(plans, sizes, {}), std::invalid_argument);
  CHECK_THROWS_AS(largest_stage_bytes(plans, sizes), std::invalid_argument);
  CHECK_THROWS_AS(stage_limit_bytes({}, 5000), std::invalid_argument);
}

TEST_CASE("memory simulator: a stage that keeps to its limit fits the budget") {
  CHECK(stage_limit_bytes(two_sizes(), 5000) == 5000 - 3000 - 3 * 30 - 5 - 110);
  CHECK(stage_limit_bytes(two_sizes(RecomputeGrain::kLayer), 5000) == 5000 - 3000 - 3 * 30 - 5 - 256);
  CHECK(stage_limit_bytes(two_sizes(), 100) == 1);
  CHECK(largest_stage_bytes(std::vector{two_layers(1)}, two_sizes()) == 3000 + 1500 + 150);
  CHECK(largest_stage_bytes(std::vector{two_layers(1)}, two_sizes(RecomputeGrain::kLayer)) == 3000 + 1500 + 4);
  Plan inference = two_layers(1);
  inference.jobs = {{Phase::kForward, {0, 1}, {0, 1}, 0}, {Phase::kForward, {1, 2}, {0, 1}, 0}};
  const auto larger = largest_stage_bytes(std::vector{inference}, two_sizes());
  CHECK(larger > 0);
  inference.jobs = {{Phase::kForward, {0, 2}, {0, 1}, 0}};
  CHECK(largest_stage_bytes(std::vector{inference}, two_sizes()) > larger);
}

TEST_CASE("memory simulator: inputs of backward stages wait on the host") {
  CHECK(waiting_on_host(two_layers(4), two_sizes().footprints, 4) == 4 * (10 + 20));
  Plan inference = two_layers(4);
  inference.jobs.resize(1);
  CHECK(waiting_on_host(inference, two_sizes().footprints, 4) == 4 * 10);
}

TEST_CASE("memory simulator: rows scale a footprint, rounded up") {
  const LayerFootprint ten{10, 20, 21, 80, 60, 99};
  const LayerFootprint three = scaled(ten, 3, 10);
  CHECK(three.inputs == 3);
  CHECK(three.output_gradients == 7);
  CHECK(three.backward == 30);
  CHECK(scaled(ten, 10, 10).backward == 99);
}

TEST_CASE("memory simulator: a layer's gradients are summed in fp32") {
  const ParameterSize narrow{.elements = 100, .element_bytes = 2, .master_bytes = 2, .trained = true};
  ParameterSize frozen = narrow, tied = narrow, wide = narrow;
  frozen.trained = false;
  tied.tied = true;
  wide.element_bytes = 4;
  const auto is = [](const LayerBytes& layer, const LayerBytes& expected) {
    return layer.weights == expected.weights && layer.gradients == expected.gradients && layer.sums == expected.sums &&
           layer.rounded == expected.rounded;
  };
  CHECK(is(layer_bytes(std::vector{narrow}), {200, 200, 400, 200}));
  CHECK(is(layer_bytes(std::vector{frozen}), {200, 0, 0, 0}));
  CHECK(is(layer_bytes(std::vector{tied}), {200, 400, 400, 0}));
  CHECK(is(layer_bytes(std::vector{wide}), {400, 400, 400, 0}));
  CHECK(is(layer_bytes(std::vector{narrow, frozen, tied, wide}), {1000, 1000, 1200, 200}));
}

TEST_CASE("memory simulator: a model and a fused Adam on the host") {
  const ParameterSize bfloat16{
      .elements = 100, .element_bytes = 2, .master_bytes = 2, .moment_bytes = 800, .trained = true};
  const ParameterSize frozen{.elements = 50, .element_bytes = 4, .moment_bytes = 400};
  const std::vector<std::vector<ParameterSize>> blocks{{bfloat16, frozen}, {frozen}};
  const HostMemory host = predict_host(blocks);
  CHECK(host.weights == 600);
  CHECK(host.gradients == 400);  // of the first block, the frozen tensor's too
  CHECK(host.masters == 200);
  CHECK(host.moments == 800);
}

TEST_CASE("memory simulator: sums of a tied parameter beside its gradient") {
  ParameterSize parameter{.elements = 100, .element_bytes = 2, .trained = true};
  CHECK(tied_sum_bytes(parameter, 1) == 0);
  CHECK(tied_sum_bytes(parameter, 3) == 3 * 400);
  parameter.element_bytes = 4;  // one of the sums becomes the gradient
  CHECK(tied_sum_bytes(parameter, 3) == 2 * 400);
  parameter.trained = false;
  CHECK(tied_sum_bytes(parameter, 3) == 0);
}

TEST_CASE("memory: what the planner places on devices of unequal memory fits each of them") {
  std::mt19937 random(18);
  const std::vector<int64_t> rooms{24'000, 16'000, 12'000};
  for (int round = 0; round < 20; ++round) {
    CAPTURE(round);
    LayerCosts costs;
    StepSizes sizes;
    for (int l = 0; l < 6 + static_cast<int>(random() % 16); ++l) {
      const int64_t weights = 500 + static_cast<int64_t>(random() % 3500), saved = 300, out = 40;
      costs.push_back({.forward_ms = 10,
                       .backward_ms = 20 + static_cast<double>(random() % 10),
                       .weight_bytes = weights,
                       .gradient_bytes = weights,
                       .activation_bytes = out,
                       .saved_bytes = saved});
      // fp32 weights: their gradients are summed in place.
      sizes.layers.push_back({.weights = weights, .gradients = weights, .sums = weights});
      sizes.footprints.push_back({.inputs = l > 0 ? out : 0,
                                  .outputs = out,
                                  .output_gradients = out,
                                  .forward = out,
                                  .saved = saved,
                                  .backward = saved});
    }
    Cluster cluster;
    for (const int64_t room : rooms) cluster.devices.push_back({1, room});
    SearchOptions options;
    options.plan.microbatches = 4;
    options.rules.asynchronous = round % 2 == 0;
    options.effort = 2'000'000;
    Placer placer(search(costs, cluster, options).front().recipe, costs, cluster, options.rules);
    std::vector<Plan> plans;
    for (int step = 0; step < 6; ++step) plans.push_back(placer.next());
    for (std::size_t device = 0; device < rooms.size(); ++device) {
      std::vector<Plan> own = plans;
      for (Plan& plan : own)
        std::erase_if(plan.jobs, [&](const Job& job) { return job.device != static_cast<int>(device); });
      CHECK(predict_device(own, sizes, {.cap_bytes = rooms[device], .waits = true}).total() <= rooms[device]);
    }
  }
}

TEST_CASE("memory simulator: frozen weights that stay take room that nothing else needs") {
  // Four layers of 1000 bytes, of which 900 are frozen, on one device: forward of three, the last fused, backward.
  StepSizes sizes;
  for (int l = 0; l < 4; ++l) {
    LayerBytes& layer = sizes.layers.emplace_back();
    layer.weights = 1000;
    layer.gradients = layer.sums = 100;
    layer.frozen = {{LayerBytes::kOwn, 900}};
    sizes.footprints.push_back(
        {.inputs = 10, .outputs = 10, .output_gradients = 10, .forward = 20, .saved = 20, .backward = 40});
  }
  const Range all{0, 2};
  Plan plan{4, 2, 1, 0, {}};
  for (int l = 0; l < 3; ++l) plan.jobs.push_back({Phase::kForward, {l, l + 1}, all, 0});
  plan.jobs.push_back({Phase::kFused, {3, 4}, all, 0});
  for (int l = 3; l-- > 0;) plan.jobs.push_back({Phase::kBackward, {l, l + 1}, all, 0});
  const std::vector<Plan> plans(2, plan);
  const auto predicted = [&](int64_t cap_bytes) {
    return predict_device(plans, sizes, {.cap_bytes = cap_bytes, .waits = true});
  };
  CHECK(predicted(0).resident == 0);
  const DeviceMemory roomy = predicted(1'000'000);
  CHECK(roomy.resident == 4 * 900);
  CHECK(roomy.weights == 2 * 100);
  CHECK(roomy.total() == roomy.needed() + roomy.resident);
  const DeviceMemory limited =
      predict_device(plans, sizes, {.cap_bytes = 1'000'000, .waits = true, .most_resident_bytes = 2000});
  CHECK(limited.resident == 2 * 900);
  CHECK(predict_device(plans, sizes, {.cap_bytes = 1'000'000, .most_resident_bytes = 0}).resident == 0);
  int64_t before = 0;
  for (int64_t cap = 1000; cap < 6000; cap += 50) {
    const DeviceMemory memory = predicted(cap);
    const DeviceMemory none = [&] {
      StepSizes trained = sizes;
      for (LayerBytes& layer : trained.layers) layer.frozen.clear();
      return predict_device(plans, trained, {.cap_bytes = cap, .waits = true});
    }();
    CHECK(none.resident == 0);
    CHECK(memory.resident % 900 == 0);
    CHECK(memory.resident >= before);
    before = memory.resident;
    if (none.total() <= cap) CHECK(memory.total() <= cap);
    CHECK(memory.needed() <= none.needed());
  }
  CHECK(before == 4 * 900);
  // A block that layers share is there once.
  for (LayerBytes& layer : sizes.layers) layer.frozen = {{7, 900}};
  CHECK(predicted(1'000'000).resident == 900);
}
