#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <roundpipe/runs/model_names.h>
#include <roundpipe/runs/trained_parts.h>
#include <roundpipe/saving/contents.h>
#include <roundpipe/training/copy_steps.h>

namespace roundpipe {

// A training at the moment of a save, beside its weights and its optimizer.
struct CapturedRun {
  int64_t step = 0;   // the checkpoint's number
  int64_t steps = 0;  // made so far
  // What writes the checkpoint, by name.
  std::vector<std::pair<std::string, std::string>> versions = {};
  // See random_states.
  StateValue::Dict other_random_states = {};
  // Of a training by several nodes: what the losses of gradients that no step has consumed were, or null.
  std::optional<nlohmann::ordered_json> loss_counts = std::nullopt;
  int64_t rank = 0;
  int64_t size = 1;  // how many processes train together
};

// A value of the program's own: an object's state_dict(), or the value itself.
struct GivenValue {
  StateValue value;
  bool is_state_dict = false;
};

// The state of a training at one moment, some of it still in motion. Of several ranks, the first has what is whole, and
// each has what only it has. Made on the caller's thread.
class Capture {
 public:
  // Takes names, buffers, counters and random states.
  Capture(ModelNames names, const std::vector<TrainedModel>& models, CapturedRun run);

  void take_schedulers(const std::vector<GivenValue>& schedulers);
  void take_values(const std::vector<std::pair<std::string, GivenValue>>& values);
  // `later` returns the scaler's state after the steps that were made so far, and how it goes on; finish() calls it.
  void take_scaler(std::function<StateValue()> later) { scaler_ = std::move(later); }

  // Takes the state of a fused optimizer and what it trains, without waiting for its steps.
  void take(const FusedOptimizer& fused, const TrainedOptimizer& optimizer,
            std::shared_ptr<saving::SnapshotMemory> memory);
  // Takes weights, the copies of them that an optimizer updates (null: there are none), that optimizer (null: none)
  // with its state_dict(), and gradients. REQUIRES: nothing runs but calls.
  void take(const std::vector<TrainedModel>& models, CopySteps* copies, const TrainedOptimizer* optimizer,
            const StateValue& state_dict);

  // Waits for what is in motion, and completes the rest. Not on the caller's thread. Throws the error of a step or a
  // call: there is no state to save then.
  void finish();
  // Nothing is to be saved after all.
  void cancel();

  // Complete after finish().
  const std::shared_ptr<Contents>& contents() const { return contents_; }

 private:
  // What only this rank has; of a process that trains alone, the common state.
  nlohmann::ordered_json& own() { return contents_->size() == 1 ? common_ : own_; }
  nlohmann::ordered_json encoded(const TrainedOptimizer& optimizer);
  void take_shown_gradients();

  const ModelNames names_;
  const std::shared_ptr<Contents> contents_;
  nlohmann::ordered_json common_ = nlohmann::ordered_json::object();
  nlohmann::ordered_json own_ = nlohmann::ordered_json::object();
  std::function<StateValue()> scaler_;
};

}  // namespace roundpipe
