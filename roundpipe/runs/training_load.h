#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <roundpipe/runs/model_names.h>
#include <roundpipe/runs/own_state.h>
#include <roundpipe/runs/trained_parts.h>
#include <roundpipe/runs/weight_places.h>
#include <roundpipe/training/copy_steps.h>

namespace roundpipe {

// How a language says in messages what is to be given.
struct LoadWords {
  std::string weights_only = "call load_weights";
  std::string scaler = "LoadOptions::scaler";
  std::string disabled_scaler = "one that scales losses; load it from Python";
  // Around the number of schedules that the training has.
  std::string schedules_before = "learning-rate schedules and the optimizer has ";
  std::string schedules_after = ", expected as many; call Optimizer::set_learning_rate as at the start";
  std::string same_parameters = "the same";
  std::string microbatches = "the number of microbatches";
};

// A training that a checkpoint is loaded into.
struct LoadedTraining {
  ModelNames names;
  std::vector<TrainedModel> models = {};
  // All that hold parameters: of these models, and of parameters that stay on the host.
  std::vector<std::shared_ptr<runtime::Pipeline>> pipelines = {};
  std::optional<TrainedOptimizer> optimizer = std::nullopt;
  bool is_fused = false;
  size_t schedules = 0;  // of the learning rate
  bool has_scaler = false;
  bool scales = false;                   // the scaler is enabled
  std::vector<std::string> takers = {};  // names of the program's values that something here takes
  int64_t rank = 0;
  int64_t size = 1;  // how many processes load together
  bool strict = true;
  bool weights_only = false;
  LoadWords words = {};
};

// What a model goes on with beside its weights, once they are loaded.
struct LoadedModel {
  std::optional<int> microbatches;           // of each call; unset: as it has been
  std::optional<int64_t> chunk_logit_bytes;  // of the loss; unset: as they were
  bool seed_is_another_s = false;            // that of the first rank, from which this one makes its own
};

// One checkpoint, and the training that it is loaded into. In two parts, between which several ranks agree: what does
// not fit is found when this is made, before anything is changed.
//
// Throws files::DamagedCheckpoint for what is wrong with the files. Thread safety: the caller's thread.
class TrainingLoad {
 public:
  // Opens the checkpoint. Throws std::invalid_argument if it does not fit. REQUIRES: nothing runs.
  TrainingLoad(const std::string& folder, LoadedTraining training);

  int64_t step() const { return stored_.step(); }
  int64_t steps() const { return stored_.state().at("steps").get<int64_t>(); }
  const StoredCheckpoint& stored() const { return stored_; }
  const WeightPlaces& places() const { return places_; }
  const OwnState& own() const { return *own_; }

  // What it has for the language's objects; nothing of weights alone. Paths as in messages.
  static std::string group_path(size_t group) { return concat("optimizer.param_groups[", group, "]"); }
  StateValue group_options(size_t group);
  // An optimizer of torch's own state_dict(); nothing for a fused one.
  StateValue optimizer_state();
  StateValue schedule(size_t index);
  const StateValue& scaler() const { return scaler_; }
  const StateValue& random() const { return random_; }
  std::vector<std::pair<std::string, StateValue>> values() const;

  // Loads the weights; of a training that goes on, with what its optimizer keeps of them. REQUIRES: nothing runs.
  void load_weights(runtime::ModelOptimizer* fused);  // and nothing else
  void load(const FusedOptimizer& fused);
  void load(CopySteps* copies);  // null: there are none
  // Loads the rest, and verifies what was not read. Returns what each of the models goes on with, in their order.
  std::vector<LoadedModel> load_rest(const std::function<void(const std::string& line)>& tell);

 private:
  void check();
  void check_groups() const;
  void load_gradients();
  LoadedModel load_model(const TrainedModel& model, const std::function<void(const std::string& line)>& tell);

  const LoadedTraining training_;
  StoredCheckpoint stored_;
  const WeightPlaces places_;
  std::optional<OwnState> own_;  // not of weights alone
  StateValue scaler_, random_;
};

}  // namespace roundpipe
