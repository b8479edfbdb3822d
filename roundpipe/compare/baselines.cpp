#include <roundpipe/compare/baselines.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace roundpipe::compare {

using namespace schedule;  // NOLINT: this file makes plans

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument("[baseline] " + what); }

std::vector<Range> ranges_of(const std::vector<int>& sizes, int layers, const char* field) {
  std::vector<Range> ranges;
  int at = 0;
  for (const int size : sizes) {
    if (size < 0) fail(std::string(field) + " has a stage of " + std::to_string(size) + " layers, expected 0 or more");
    ranges.push_back({at, at + size});
    at += size;
  }
  if (at != layers)
    fail(std::string(field) + " has " + std::to_string(at) + " layers, expected the " + std::to_string(layers) +
         " below the head");
  return ranges;
}

// The forward or backward of one chunk for one microbatch.
struct Step {
  int chunk;
  int microbatch;
  bool backward;
};

// Chunk c runs on device c % devices; each device has its own order of steps.
class Pipeline {
 public:
  // `split_head`: the head is part of the last chunk, in both directions; else it runs in one fused visit.
  // Only for orders in which every forward comes before every backward.
  Pipeline(std::vector<Range> chunks, int layers, int devices, int microbatches, bool split_head)
      : chunks_(std::move(chunks)),
        layers_(layers),
        devices_(devices),
        microbatches_(microbatches),
        split_head_(split_head) {
    if (split_head_) ++chunks_.back().last;
  }

  // `orders`: the steps of each device. Emits a step after the steps that it depends on: the plan is topological.
  Plan emit(const std::vector<std::vector<Step>>& orders) {
    Plan plan{layers_, microbatches_, devices_, 0, {}};
    const std::size_t cells = chunks_.size() * static_cast<std::size_t>(microbatches_);
    std::vector<char> forward_done(cells, 0), backward_done(cells, 0);
    std::vector<std::size_t> next(orders.size(), 0);
    const auto cell = [&](int chunk, int m) {
      return static_cast<std::size_t>(chunk) * static_cast<std::size_t>(microbatches_) + static_cast<std::size_t>(m);
    };
    const int last = static_cast<int>(chunks_.size()) - 1;
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t device = 0; device < orders.size(); ++device) {
        while (next[device] < orders[device].size()) {
          const Step step = orders[device][next[device]];
          const bool ready = step.backward
                                 ? forward_done[cell(step.chunk, step.microbatch)] &&
                                       (step.chunk == last || backward_done[cell(step.chunk + 1, step.microbatch)])
                                 : step.chunk == 0 || forward_done[cell(step.chunk - 1, step.microbatch)];
          if (!ready) break;
          add(plan, step, static_cast<int>(device), last);
          (step.backward ? backward_done : forward_done)[cell(step.chunk, step.microbatch)] = 1;
          ++next[device];
          moved = true;
        }
      }
    }
    validate(plan, split_head_ ? PlanMode::kTrain : PlanMode::kFused);
    return plan;
  }

 private:
  void add(Plan& plan, const Step& step, int device, int last) const {
    const Range microbatch{step.microbatch, step.microbatch + 1};
    const Range layers = chunks_[static_cast<std::size_t>(step.chunk)];
    if (step.backward && step.chunk == last && !split_head_)
      plan.jobs.push_back({Phase::kFused, {layers_ - 1, layers_}, microbatch, device});
    if (layers.size() > 0)
      plan.jobs.push_back({step.backward ? Phase::kBackward : Phase::kForward, layers, microbatch, device});
  }

  std::vector<Range> chunks_;
  const int layers_;
  const int devices_;
  const int microbatches_;
  const bool split_head_;
};

std::vector<std::vector<Step>> breadth_first(int chunks, int devices, int microbatches) {
  std::vector<std::vector<Step>> orders(static_cast<std::size_t>(devices));
  for (int chunk = 0; chunk < chunks; ++chunk) {
    for (int m = 0; m < microbatches; ++m)
      orders[static_cast<std::size_t>(chunk % devices)].push_back({chunk, m, false});
  }
  for (int chunk = chunks - 1; chunk >= 0; --chunk) {
    for (int m = 0; m < microbatches; ++m)
      orders[static_cast<std::size_t>(chunk % devices)].push_back({chunk, m, true});
  }
  return orders;
}

// `loops` chunks per device; one loop is plain 1F1B.
std::vector<std::vector<Step>> one_forward_one_back(int loops, int devices, int microbatches) {
  std::vector<std::vector<Step>> orders(static_cast<std::size_t>(devices));
  const int total = microbatches * loops;
  for (int device = 0; device < devices; ++device) {
    const int warm_up =
        std::min(total, loops == 1 ? devices - device - 1 : (devices - device - 1) * 2 + (loops - 1) * devices);
    const auto step = [&](int number, bool backward) {
      if (loops == 1) return Step{device, number, backward};
      const int group = number / (devices * loops), inside = number % (devices * loops);
      const int loop = backward ? loops - 1 - inside / devices : inside / devices;
      return Step{loop * devices + device, group * devices + inside % devices, backward};
    };
    auto& order = orders[static_cast<std::size_t>(device)];
    for (int i = 0; i < warm_up; ++i) order.push_back(step(i, false));
    for (int i = warm_up; i < total; ++i) {
      order.push_back(step(i, false));
      order.push_back(step(i - warm_up, true));
    }
    for (int i = total - warm_up; i < total; ++i) order.push_back(step(i, true));
  }
  return orders;
}

Plan published(const BaselineSizes& sizes, int layers, int devices, int microbatches, int first_device) {
  const std::vector<Range> forward = ranges_of(sizes.forward, layers - 1, "forward");
  std::vector<int> upward(sizes.backward.rbegin(), sizes.backward.rend());
  std::vector<Range> backward = ranges_of(upward, layers - 1, "backward");
  std::ranges::reverse(backward);
  Plan plan{layers, microbatches, devices, 0, {}};
  int turn = first_device;
  for (int first = 0; first < microbatches; first += devices) {
    const Range round{first, std::min(first + devices, microbatches)};
    const auto add = [&](Phase phase, Range stage) {
      if (stage.size() == 0) return;
      plan.jobs.push_back({phase, stage, round, turn});
      turn = (turn + 1) % devices;
    };
    for (const Range& stage : forward) add(Phase::kForward, stage);
    add(Phase::kFused, {layers - 1, layers});
    for (const Range& stage : backward) add(Phase::kBackward, stage);
  }
  validate(plan, PlanMode::kFused);
  return plan;
}

std::vector<int> sizes_of(const std::vector<Range>& ranges) {
  std::vector<int> sizes;
  for (const Range& range : ranges) sizes.push_back(range.size());
  return sizes;
}

}  // namespace

BaselineSizes default_sizes(const LayerCosts& costs, int devices) {
  validate(costs);
  const CostSums sums(costs);
  const int body = sums.layers() - 1;
  BaselineSizes sizes;
  if (body == 0) return sizes;
  const auto even = [&](int stages) {
    PartitionTable table = partitions_of(sums, {0, body}, true, 0);
    std::vector<int> cut = sizes_of(table.cut(std::min(stages, body)));
    cut.resize(static_cast<std::size_t>(stages), 0);
    return cut;
  };
  sizes.pipeline = even(devices);
  sizes.chunks = even(devices * std::max(1, body / devices));
  const LayerCosts below(costs.begin(), costs.end() - 1);
  PlannerOptions options;
  options.mode = PlanMode::kTrain;
  const Stages greedy = greedy_stages(below, devices, options);
  sizes.forward = sizes_of(greedy.forward);
  sizes.backward = sizes_of(greedy.backward);
  return sizes;
}

Plan baseline_plan(Baseline baseline, const BaselineSizes& sizes, int layers, int devices, int microbatches,
                   int first_device) {
  if (layers < 1 || devices < 1 || microbatches < 1) fail("layers, devices and microbatches have to be at least 1");
  if (first_device < 0 || first_device >= devices) fail("first_device does not exist");
  if (baseline == Baseline::kPublished) return published(sizes, layers, devices, microbatches, first_device);
  const bool looped = baseline == Baseline::kInterleaved || baseline == Baseline::kLoopedBfs;
  std::vector<Range> chunks =
      looped ? ranges_of(sizes.chunks, layers - 1, "chunks") : ranges_of(sizes.pipeline, layers - 1, "pipeline");
  const int count = static_cast<int>(chunks.size());
  if (count % devices != 0 || (!looped && count != devices))
    fail(std::string(looped ? "chunks" : "pipeline") + " has " + std::to_string(count) + " stages, expected " +
         (looped ? "a multiple of the " : "the ") + std::to_string(devices) + " devices");
  if (baseline == Baseline::kInterleaved && count > devices && microbatches % devices != 0)
    fail("microbatches is " + std::to_string(microbatches) + ", expected a multiple of the " + std::to_string(devices) +
         " devices for an interleaved schedule");
  const bool breadth = baseline == Baseline::kGPipe || baseline == Baseline::kLoopedBfs;
  Pipeline pipeline(std::move(chunks), layers, devices, microbatches, breadth);
  return pipeline.emit(breadth ? breadth_first(count, devices, microbatches)
                               : one_forward_one_back(count / devices, devices, microbatches));
}

}  // namespace roundpipe::compare
