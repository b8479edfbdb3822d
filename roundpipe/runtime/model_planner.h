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

// What the layers of a model take, learned from what calls executed: smoothed, one microbatch, in milliseconds.
// Where layers have no clock of their own (LayerState::forward_ms, backward_ms), a stage's time is shared out to them
// in proportion to what they were thought to take, so different cuts sharpen the picture. Thread safety: one thread at
// a time.
class CostMeter {
 public:
  // `model` outlives the meter.
  explicit CostMeter(const ModelState& model);

  // What each layer holds of a microbatch from its forward to its backward, and what it hands on.
  void set_bytes(std::vector<int64_t> saved_bytes, std::vector<int64_t> activation_bytes);

  void add(const std::vector<ExecutionRecord>& records);
  // Whether every layer has been seen forward (and backward, if asked for) in at least so many calls.
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
  // Per layer; empty = not known.
  std::vector<int64_t> saved_bytes_;
  std::vector<int64_t> activation_bytes_;
};

// What the weights of one stage may take on the engine's devices, in bytes: two stages' weights, the gradients of one
// and its activations must fit beside each other. Not above `limit_bytes`, unless that is 0; never below the largest
// layer, which is tried anyway: whether it fits is the device's to say. 0 = no limit.
int64_t stage_share_bytes(Engine& engine, const schedule::LayerCosts& costs, int64_t limit_bytes = 0);

// Plans a model's calls: stages from estimated costs at first, from measured ones after two calls, and again when what
// is measured has drifted by more than a fifth. Devices are placed step by step (schedule::Placer).
// No plan has replicas, so that sums of gradients do not depend on it. Thread safety: one thread at a time.
class ModelPlanner {
 public:
  explicit ModelPlanner(const ModelState& model) : meter_(model) {}

  void observe(const std::vector<ExecutionRecord>& records) { meter_.add(records); }

  // How steps are made, which is what it plans for.
  bool asynchronous() const { return asynchronous_; }
  void set_asynchronous(bool asynchronous) { asynchronous_ = asynchronous; }

  // The plan of the next call.
  schedule::Plan next(Engine& engine, schedule::PlanMode mode, int microbatches, int first_backward_layer);
  // The plans of the next `steps` calls, as things stand.
  std::vector<schedule::Plan> preview(Engine& engine, schedule::PlanMode mode, int microbatches,
                                      int first_backward_layer, int steps) const;
  // The stages that a plan of a call would have now.
  schedule::Stages stages(Engine& engine, schedule::PlanMode mode, int microbatches) const;
  // The stages that simple balancing by measured (or estimated) costs gives now, see schedule::choose_stages.
  schedule::Stages balanced_stages(Engine& engine, schedule::PlanMode mode, int min_stages, double upper_threshold,
                                   int64_t memory_limit_bytes) const;
  schedule::LayerCosts costs() const { return meter_.costs(); }

  // In plans from now on no stage takes more than `most_stage_bytes` for its weights, gradients and saved activations,
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
    schedule::LayerCosts costs;  // that it was planned with
    bool measured = false;
    int calls = 0;  // since
  };
  schedule::Plan recipe(Engine& engine, const Key& key, bool measured) const;
  schedule::Placer placer(Engine& engine, const Key& key, bool measured) const;

  CostMeter meter_;
  bool asynchronous_ = true;
  int64_t most_stage_bytes_ = -1;  // not known
  std::map<Key, Current> current_;
};

}  // namespace roundpipe::runtime
