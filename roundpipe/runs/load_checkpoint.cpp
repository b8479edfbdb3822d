#include <roundpipe/runs/load_checkpoint.h>

#include <algorithm>
#include <stdexcept>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/files/damage.h>
#include <roundpipe/files/fall_back.h>
#include <roundpipe/runs/model_parts.h>
#include <roundpipe/runs/optimizer_options.h>
#include <roundpipe/runs/random_states.h>
#include <roundpipe/runs/run_folders.h>
#include <roundpipe/runs/save_checkpoint.h>
#include <roundpipe/runs/torch_optimizer.h>
#include <roundpipe/runs/training_load.h>
#include <roundpipe/saving/contents.h>

namespace roundpipe {

namespace {

// Calls `read` with a value that the state has under `path`; one of another type than it asks for is damage.
template <typename Read>
auto taken(const TrainingLoad& load, const StateValue& value, const std::string& path, Read read) {
  try {
    return read(value);
  } catch (const WrongStateType& wrong) {
    throw files::damage_of(files::join(load.stored().folder(), kStateFile), concat(path, ": ", wrong.what()));
  }
}

// What is loaded into; at most one of the optimizers.
struct Request {
  ModelGroup group;
  Optimizer* fused = nullptr;
  torch::optim::Optimizer* torch = nullptr;
  GradScaler* scaler = nullptr;
  bool strict = true;
  bool weights_only = false;

  optim::Algorithm algorithm() const { return fused ? fused->algorithm() : algorithm_of(*torch, "load_checkpoint"); }
  std::vector<optim::Hyperparameters> options() const { return fused ? fused->all_options() : options_of(*torch); }
};

LoadedTraining training_of(const Request& request) {
  std::vector<TrainedModel> models = parts_of(request.group);
  // A number that was chosen may be another one.
  for (size_t i = 0; i < models.size(); ++i) {
    if (request.group.models[i].second->run_options().microbatches == kAutoMicrobatches) models[i].microbatches.reset();
  }
  LoadedTraining training{.names = names_of(request.group, {}),
                          .models = std::move(models),
                          .pipelines = pipelines_of(request.group),
                          .is_fused = request.fused != nullptr,
                          .schedules = request.fused == nullptr ? 0 : schedules_of(*request.fused).size(),
                          .has_scaler = request.scaler != nullptr,
                          .scales = request.scaler != nullptr,
                          .strict = request.strict,
                          .weights_only = request.weights_only};
  if (request.fused != nullptr) training.optimizer = parts_of(*request.fused, training.names);
  if (request.torch != nullptr) training.optimizer = parts_of(*request.torch, "load_checkpoint");
  return training;
}

// The checkpoint's options of each group, for the optimizer.
std::vector<GroupOptions> read_groups(TrainingLoad& load, const Request& request) {
  if (request.fused == nullptr && request.torch == nullptr) return {};
  std::vector<GroupOptions> read;
  const std::vector<optim::Hyperparameters> own = request.options();
  for (size_t i = 0; i < own.size(); ++i) {
    read.push_back(taken(load, load.group_options(i), TrainingLoad::group_path(i), [&](const StateValue& options) {
      return read_options(request.algorithm(), options, own[i]);
    }));
  }
  return read;
}

void load_fused_part(TrainingLoad& load, Optimizer& optimizer, const std::vector<GroupOptions>& groups) {
  std::vector<optim::Hyperparameters> options;
  std::vector<double> first_rates;
  for (const GroupOptions& group : groups) {
    options.push_back(group.options);
    first_rates.push_back(group.first_rate.value_or(group.options.lr));
  }
  optimizer.restore(std::move(options), std::move(first_rates), load.steps());
  load.load(fused_of(optimizer));
}

// Throws std::invalid_argument for what an optimizer of the model's own parameters cannot have.
void require_no_copies(const TrainingLoad& load, const Model& model) {
  const StoredCheckpoint& stored = load.stored();
  if (!stored.section(kPrevious).empty()) {
    stored.require_whole({kPrevious});
    throw std::invalid_argument(concat("[load_checkpoint] ", stored.folder(),
                                       " was saved after an asynchronous step, whose weights the next call does not "
                                       "read yet, which optimizers of libtorch do not have; load it from Python"));
  }
  for (const auto& [name, parameter] : model.parameter_names()) {
    const auto copy = stored.section(kOptimizer).find(concat(name, "/", kCopy));
    if (copy == stored.section(kOptimizer).end() || copy->second.dtype == parameter.scalar_type()) continue;
    stored.require_whole({kOptimizer});
    throw std::invalid_argument(concat(
        "[load_checkpoint] the saved optimizer updates a copy of '", name, "' in ", c10::toString(copy->second.dtype),
        ", and the model's is ", parameter.scalar_type(), "; load it from Python, or make the model in that dtype"));
  }
}

// Loads the one model that libtorch's optimizer steps, or none.
void load_plain_part(TrainingLoad& load, const Request& request, const std::vector<GroupOptions>& groups) {
  const Model& model = *request.group.models.at(0).second;
  CopySteps* const copies = model.copy_steps().get();
  if (copies == nullptr) require_no_copies(load, model);
  if (request.torch == nullptr) return load.load(copies);
  std::vector<optim::Hyperparameters> options;
  for (const GroupOptions& group : groups) options.push_back(group.options);
  const std::function<void()> give = taken(load, load.optimizer_state(), "optimizer",
                                           [&](const StateValue& state) { return read_state(*request.torch, state); });
  load.load(copies);
  set_options(*request.torch, options);
  give();
}

GradScaler::State read_scale(const TrainingLoad& load) {
  return taken(load, load.scaler(), "scaler", [&](const StateValue& saved) {
    GradScaler::State scale;
    scale.scale = saved.at("state").at("scale").as_double();
    scale.growth_tracker = static_cast<int64_t>(saved.at("state").at("_growth_tracker").as_double());
    const StateValue& front = saved.at("resume").at("front");
    scale.front = front.is_none() ? scale.scale : front.as_double();
    return scale;
  });
}

Loaded load_one(const std::string& folder, const Request& request) {
  // First: what earlier work throws says nothing about the checkpoint.
  for (const auto& [path, model] : request.group.models) {
    model->synchronize();
    wait_for_save(*model);
  }
  TrainingLoad load(folder, training_of(request));
  Loaded loaded{load.step(), folder, {}, load.places().missing(), load.places().unexpected()};
  if (request.weights_only) {
    load.load_weights(request.group.models.at(0).second->fused_optimizer().get());
    return loaded;
  }
  // Everything that may not fit is read before anything is changed.
  loaded.state = load.values();
  const std::vector<GroupOptions> groups = read_groups(load, request);
  GradScaler::State scale;
  if (request.scaler != nullptr) scale = read_scale(load);
  if (request.fused != nullptr)
    load_fused_part(load, *request.fused, groups);
  else
    load_plain_part(load, request, groups);
  const std::vector<LoadedModel> go_on = load.load_rest(tell_user);
  for (size_t i = 0; i < go_on.size(); ++i) {
    Model& model = *request.group.models[i].second;
    if (go_on[i].microbatches && model.run_options().microbatches == kAutoMicrobatches)
      model.set_auto_microbatches(go_on[i].microbatches);
    else if (go_on[i].microbatches)
      model.run_options().microbatches = go_on[i].microbatches;
    if (go_on[i].chunk_logit_bytes) model.run_options().chunk_logit_bytes = go_on[i].chunk_logit_bytes;
  }
  if (request.scaler != nullptr) request.scaler->resume(scale, /*losses_wait=*/!load.own().gradients().empty());
  restore_random_states(load.random());
  return loaded;
}

Loaded load(const std::string& folder, const Request& request) {
  require_callers_thread();
  wait_for_saves(folder);
  files::FallBack fall_back(folder, tell_user);
  while (true) {
    const std::string path = fall_back.next();
    try {
      return load_one(path, request);
    } catch (const files::DamagedCheckpoint& damage) {
      fall_back.damaged(damage.what());
    }
  }
}

// Throws std::invalid_argument for no models, or for some that an optimizer steps with others.
void require_models(const ModelGroup& group) {
  if (group.models.empty()) throw std::invalid_argument("[load_weights] there are no models, expected at least one");
  for (const auto& [path, model] : group.models) {
    if (!model->fused_steps() || steps_all_of(*model->fused_steps(), group)) continue;
    throw std::invalid_argument(concat("[load_weights] ", model->name(),
                                       " has an Optimizer that steps it together with other models or parameters than "
                                       "these, expected the same ones in the same order"));
  }
}

void require_plain(const Model& model) {
  if (!model.fused_optimizer()) return;
  throw std::invalid_argument(
      "[load_checkpoint] a roundpipe::Optimizer was made for this model and steps it, expected that one as the third "
      "argument");
}

}  // namespace

const StateValue& Loaded::value(const std::string& name) const {
  const auto found = std::ranges::find(state, name, &std::pair<std::string, StateValue>::first);
  if (found != state.end()) return found->second;
  throw std::invalid_argument(concat("[load_checkpoint] ", folder, " has no state '", name, "'"));
}

Loaded load_checkpoint(const std::string& folder, Model& model, Optimizer& optimizer, const LoadOptions& options) {
  return load_checkpoint(folder, group_of(model), optimizer, options);
}

Loaded load_checkpoint(const std::string& folder, const ModelGroup& group, Optimizer& optimizer,
                       const LoadOptions& options) {
  require_whole_optimizer("load_checkpoint", group, optimizer);
  return load(folder, {.group = group, .fused = &optimizer, .scaler = options.scaler, .strict = options.strict});
}

Loaded load_checkpoint(const std::string& folder, Model& model, torch::optim::Optimizer& optimizer,
                       const LoadOptions& options) {
  require_plain(model);
  return load(folder,
              {.group = group_of(model), .torch = &optimizer, .scaler = options.scaler, .strict = options.strict});
}

Loaded load_checkpoint(const std::string& folder, Model& model, const LoadOptions& options) {
  require_plain(model);
  return load(folder, {.group = group_of(model), .scaler = options.scaler, .strict = options.strict});
}

Loaded load_weights(const std::string& folder, Model& model, bool strict) {
  return load_weights(folder, group_of(model), strict);
}

Loaded load_weights(const std::string& folder, const ModelGroup& group, bool strict) {
  require_models(group);
  return load(folder, {.group = group, .strict = strict, .weights_only = true});
}

}  // namespace roundpipe
