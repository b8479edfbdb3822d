#pragma once

#include <algorithm>
#include <compare>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include <roundpipe/runtime/cost_meter.h>
#include <roundpipe/runtime/engine.h>
#include <roundpipe/schedule/search.h>

namespace roundpipe::runtime {

// The bytes that the weights of one stage may take on the engine's devices: the weights of two stages, the gradients of
// one and its activations must fit together. At most `limit_bytes`, unless that is 0; at least the largest layer, which
// is tried in any case, since only the device can tell whether it fits. 0 = no limit.
int64_t stage_share_bytes(Engine& engine, const schedule::LayerCosts& costs, int64_t limit_bytes = 0);

// A machine as it has been measured for one model: what its plans are made for.
struct MeasuredMachine {
  schedule::Cluster cluster;     // bandwidths that are not measured are 0; memory: the devices' limits
  std::vector<LinkRates> links;  // of each device, of which the cluster has the slowest
  // Of the model's optimizer; 0 = not measured. Its traffic is not counted: the rates of links and updates are what
  // they reach beside each other.
  double update_gb_per_s = 0;
  // How the devices' links work, see device::LinkOptions: the largest chunk (0 = not cut), and whether all go
  // by priority.
  std::int64_t chunk_bytes = 0;
  bool priorities = true;
};

// Steps of a plan whose memory is predicted: each step assigns devices again.
constexpr int kPredictedSteps = 3;

// One finished training step.
struct MeasuredStep {
  int microbatches = 0;
  double start_ms = 0;  // Clock milliseconds of the first and the last work on any device
  double end_ms = 0;
  double busy_ms = 0;  // of all devices together, without waiting
};

// What a call asks a plan for.
struct PlanRequest {
  schedule::PlanMode mode = schedule::PlanMode::kFused;
  int microbatches = 1;
  int gradient_groups = 1;  // see schedule::GradientGroups
  RecomputeGrain recompute_grain = RecomputeGrain::kStage;
  int first_backward_layer = 0;
  std::vector<char> trained = {};  // [layer]: whether it sums gradients

  auto operator<=>(const PlanRequest&) const = default;
};
schedule::PlannerOptions options_of(const PlanRequest& request);
// Layers with a trainable parameter: [layer][parameter] -> [layer].
std::vector<char> trained_layers(const std::vector<std::vector<char>>& trainable);

// Plans a model's calls: from estimated costs at first, from measured ones after two calls, and again if costs, speeds
// or rates have drifted by more than a fifth or batches come earlier or later than before, at the earliest after eight
// calls. In between it searches on, three times, with four calls in between: with newer measurements and other random
// numbers, from the plan in use, which it keeps unless it finds a better one. A plan from measurements counts every
// byte where the links' rates matter (simulate::search_links). Steps overlap only while batches are submitted early.
// Devices are placed step by step (schedule::Placer), and share layers that sum gradients by whole groups only, so that
// the sums do not depend on the plan. Where layers are recomputed one by one, each has a backward stage of its own,
// unless the host has no room for the inputs of all of them. The search's effort is counted: on an idle core it takes
// about as long as a step, at least 0.05 s and at most 1 s.
// Thread safety: one thread at a time.
class ModelPlanner {
 public:
  explicit ModelPlanner(const ModelState& model) : model_(model), meter_(model) {}

  // What a finished call has measured.
  void observe(const ExecutionLog& log);
  // A training call follows one whose losses no device has begun to compute (`early`), or has.
  void note_submission(bool early) { early_share_ += kNewShare * ((early ? 1 : 0) - early_share_); }
  // The pool has other devices from now on.
  void forget_devices();

  // Whether steps are asynchronous, which plans take into account.
  bool asynchronous() const { return asynchronous_; }
  void set_asynchronous(bool asynchronous) { asynchronous_ = asynchronous; }

  // The plan of the next call.
  schedule::Plan next(Engine& engine, const PlanRequest& request);
  // The plans of the next `steps` calls, if nothing changes.
  std::vector<schedule::Plan> preview(Engine& engine, const PlanRequest& request, int steps) const;
  // The stages that a plan made now would have.
  schedule::Stages stages(Engine& engine, schedule::PlanMode mode, int microbatches) const;
  // The most that a stage's weights may take: `limit_bytes` (0: no limit), or less where a device holds less, but a
  // layer's at least. 0: no limit.
  int64_t stage_limit_bytes(Engine& engine, int64_t limit_bytes) const;

  schedule::LayerCosts costs() const { return meter_.costs(); }
  // Whether calls have measured every layer's forward and backward, from `first_backward_layer` 0.
  bool knows_costs() const;
  MeasuredMachine machine(Engine& engine) const { return machine(engine, engine.size()); }
  // The latest finished training steps, oldest first.
  const std::vector<MeasuredStep>& steps() const { return steps_; }
  // The share of the latest steps' time in which `devices` computed, from 0 to 1; unset until two have been measured.
  std::optional<double> busy_share(int devices) const;
  // The cut of a plan that next() has returned; empty for another, and for one that has been forgotten.
  std::optional<schedule::Cut> cut_of(const schedule::Plan& plan) const;

  // The predicted milliseconds of a training step of that many microbatches, each of which takes `scale` times the
  // current costs, by a search of little effort.
  double predicted_ms(Engine& engine, int microbatches, int gradient_groups, double scale) const;

  // From now on, no planned stage takes more than `most_stage_bytes` for its weights, gradients and saved activations,
  // unless it is one layer; 0 = no cap. On one device, the fused stage of a first plan has `fused_layers`, and those of
  // later ones no more (0: as balance says). Ends what keep_within() and
  // allow_longer() have said. See CostMeter::set_bytes.
  void set_bytes(std::vector<int64_t> saved_bytes, std::vector<int64_t> activation_bytes, int64_t most_stage_bytes,
                 int fused_layers = 0);
  // Whether the devices have room for these steps, of one plan.
  using Fits = std::function<bool(const std::vector<schedule::Plan>& steps)>;
  // Until the next set_bytes(), plans from measurements are the best of those found that fit, if any does.
  void keep_within(Fits fits) { fits_ = std::move(fits); }
  // What they may have beyond those limits, where several devices sum gradients by groups.
  struct LongerStages {
    int fused_layers = 0;
    int64_t stage_bytes = 0;  // for weights, gradients and saved activations of any stage
  };
  void allow_longer(LongerStages longer) { longer_ = longer; }
  // Stages as long as the limits allow, as those of a first plan on one device, with that many fused layers (0: as
  // balance says). REQUIRES: set_bytes() has set limits.
  schedule::Stages longest_stages(Engine& engine, const PlanRequest& request, int fused_layers) const;
  // Plans from measurements leave no more than this waiting on the host for the backward of a step, if that is
  // possible; 0: what memory::room_for_values() says then, half of it while steps overlap.
  void set_host_room(int64_t host_room_bytes) { host_room_bytes_ = host_room_bytes; }

 private:
  struct Key {
    PlanRequest request;
    int devices;
    bool asynchronous;
    auto operator<=>(const Key&) const = default;
  };
  // What a plan is made from.
  struct Basis {
    schedule::LayerCosts costs;
    MeasuredMachine machine;
    bool measured = false;
    bool early = false;
  };
  struct Made {
    schedule::Cut cut;
    schedule::Plan recipe;
    schedule::Placer placer;
  };
  struct Current {
    std::optional<Made> made;
    Basis basis;
    int calls = 0;     // since it was planned
    int searches = 0;  // since then
  };
  // The limits of stages: what the layers of one may hold on a device. See CostMeter::set_bytes.
  struct Room {
    std::vector<int64_t> held_bytes;   // of each layer
    std::vector<int64_t> share_bytes;  // of a stage, on each device; 0 = no limit
    int64_t least() const { return *std::ranges::min_element(share_bytes); }
  };

  Key key_of(Engine& engine, PlanRequest request) const;
  // Of the model as it is.
  PlanRequest request_of(schedule::PlanMode mode, int microbatches) const;
  Basis basis(Engine& engine, const Key& key) const;
  // With so many devices, since their number may change while a plan is made.
  MeasuredMachine machine(Engine& engine, int devices) const;
  // About what a device has for frozen weights that stay; 0 = none stay.
  int64_t resident_room_bytes(const device::Device& device) const;
  Room room(Engine& engine, const schedule::LayerCosts& costs, int devices) const;
  // Balanced stages within those limits.
  schedule::Cut simple_cut(const Key& key, const Basis& basis, const Room& limits, int fused_layers) const;
  // What a step may leave waiting on the host. `overlap`: two steps at a time.
  int64_t room_on_host(bool overlap) const;
  // `current`: what is in use, if it may be kept.
  Made make(Engine& engine, const Key& key, const Basis& basis, const Current* current = nullptr) const;
  schedule::Cut found(const Key& key, const Basis& basis, const Room& room, const schedule::Cut& simple,
                      const Current* current) const;
  static schedule::Plan recipe_of(const Key& key, const Basis& basis, const schedule::Cut& cut);
  // Places the steps of a recipe.
  schedule::Placer placer_of(const Key& key, const Basis& basis, const schedule::Plan& recipe) const;

  static constexpr double kNewShare = 0.3;  // the weight of the latest call in a smoothed share

  const ModelState& model_;
  CostMeter meter_;
  bool asynchronous_ = true;
  double early_share_ = 0;         // of calls that come early, smoothed
  int64_t most_stage_bytes_ = -1;  // -1 = unknown
  int fused_layers_ = 0;
  LongerStages longer_;
  Fits fits_;
  int64_t host_room_bytes_ = 0;
  std::map<Key, Current> current_;
  std::vector<MeasuredStep> steps_;
};

}  // namespace roundpipe::runtime
