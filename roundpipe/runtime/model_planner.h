#pragma once

#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include <roundpipe/runtime/call/call.h>
#include <roundpipe/runtime/engine.h>
#include <roundpipe/schedule/search.h>

namespace roundpipe::runtime {

// The times of a model's layers, learned from executed calls: smoothed, for one microbatch, in milliseconds. If layers
// are not timed one by one (LayerState::forward_ms, backward_ms), a stage's time is divided among them in proportion to
// the current estimates, so that different cuts refine the estimates. Thread safety: one thread at a time.
class CostMeter {
 public:
  // `model` outlives the meter.
  explicit CostMeter(const ModelState& model);

  // The bytes that each layer holds per microbatch from its forward to its backward, and the bytes of its outputs.
  void set_bytes(std::vector<int64_t> saved_bytes, std::vector<int64_t> activation_bytes);

  void add(const std::vector<ExecutionRecord>& records);
  // Whether the forward of every layer (and the backward, if `backward`) has been measured in at least `calls` calls.
  bool knows(bool backward, int calls) const;
  schedule::LayerCosts costs() const;

 private:
  struct Layer {
    double forward_ms;
    double backward_ms;
    int forward_calls = 0;
    int backward_calls = 0;
    bool backward_clocked = false;
  };
  double forward_ms(schedule::Range layers) const;

  const ModelState& model_;
  std::vector<Layer> layers_;
  std::vector<int64_t> weight_bytes_;
  // Per layer; empty = unknown.
  std::vector<int64_t> saved_bytes_;
  std::vector<int64_t> activation_bytes_;
};

// The bytes that the weights of one stage may take on the engine's devices: the weights of two stages, the gradients of
// one and its activations must fit together. At most `limit_bytes`, unless that is 0; at least the largest layer, which
// is tried in any case, since only the device can tell whether it fits. 0 = no limit.
int64_t stage_share_bytes(Engine& engine, const schedule::LayerCosts& costs, int64_t limit_bytes = 0);

// Plans a model's calls: from estimated costs at first, from measured ones after two calls, and again if measured costs
// have drifted by more than a fifth, at the earliest after eight calls. Devices are placed step by step
// (schedule::Placer). No plan has replicas, so that sums of gradients do not depend on it. Thread safety: one thread at
// a time.
class ModelPlanner {
 public:
  explicit ModelPlanner(const ModelState& model) : meter_(model) {}

  void observe(const std::vector<ExecutionRecord>& records) { meter_.add(records); }

  // Whether steps are asynchronous, which plans take into account.
  bool asynchronous() const { return asynchronous_; }
  void set_asynchronous(bool asynchronous) { asynchronous_ = asynchronous; }

  // The plan of the next call.
  schedule::Plan next(Engine& engine, schedule::PlanMode mode, int microbatches, int first_backward_layer);
  // The plans of the next `steps` calls, if nothing changes.
  std::vector<schedule::Plan> preview(Engine& engine, schedule::PlanMode mode, int microbatches,
                                      int first_backward_layer, int steps) const;
  // The stages that a plan made now would have.
  schedule::Stages stages(Engine& engine, schedule::PlanMode mode, int microbatches) const;
  // The stages that simple balancing by measured (or estimated) costs gives now, see schedule::choose_stages.
  schedule::Stages balanced_stages(Engine& engine, schedule::PlanMode mode, int min_stages, double upper_threshold,
                                   int64_t memory_limit_bytes) const;
  schedule::LayerCosts costs() const { return meter_.costs(); }

  // From now on, no planned stage takes more than `most_stage_bytes` for its weights, gradients and saved activations,
  // unless it is one layer; 0 = no cap. See CostMeter::set_bytes.
  void set_bytes(std::vector<int64_t> saved_bytes, std::vector<int64_t> activation_bytes, int64_t most_stage_bytes);

 private:
  int64_t stage_bytes(Engine& engine, const schedule::LayerCosts& costs) const;
  struct Key {
    schedule::PlanMode mode;
    int microbatches, first_backward_layer, devices;
    bool asynchronous;
    auto operator<=>(const Key&) const = default;
  };
  struct Current {
    std::optional<schedule::Placer> placer;
    schedule::LayerCosts costs;  // used for the plan
    bool measured = false;
    int calls = 0;  // since it was planned
  };
  schedule::Plan recipe(Engine& engine, const Key& key, bool measured) const;
  schedule::Placer placer(Engine& engine, const Key& key, bool measured) const;

  CostMeter meter_;
  bool asynchronous_ = true;
  int64_t most_stage_bytes_ = -1;  // -1 = unknown
  std::map<Key, Current> current_;
};

}  // namespace roundpipe::runtime
