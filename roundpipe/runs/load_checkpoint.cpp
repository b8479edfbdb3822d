#include <roundpipe/runs/load_checkpoint.h>

#include <algorithm>
#include <stdexcept>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <roundpipe/checkpoint/damage.h>
#include <roundpipe/checkpoint/fall_back.h>
#include <roundpipe/core/arithmetic.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/loss_chunks.h>
#include <roundpipe/device/fp16_accumulation.h>
#include <roundpipe/runs/load_fused.h>
#include <roundpipe/runs/optimizer_options.h>
#include <roundpipe/runs/run_folders.h>
#include <roundpipe/runs/save_checkpoint.h>
#include <roundpipe/runs/torch_optimizer.h>
#include <roundpipe/runs/weight_places.h>
#include <roundpipe/runtime/engine.h>

namespace roundpipe {

using nlohmann::json;

namespace {

// Calls `read` with what the state has under `path`; a value of another type than it asks for is damage.
template <typename Read>
auto decoded(StoredCheckpoint& stored, const json& encoded, const std::string& path, Read read) {
  const StateValue value = stored.value(encoded, path);
  try {
    return read(value);
  } catch (const WrongStateType& wrong) {
    throw checkpoint::damage_of(checkpoint::join(stored.folder(), kStateFile), concat(path, ": ", wrong.what()));
  }
}

// What is loaded into; at most one of the optimizers.
struct Request {
  Model& model;
  Optimizer* fused = nullptr;
  torch::optim::Optimizer* torch = nullptr;
  GradScaler* scaler = nullptr;
  bool strict = true;
  bool weights_only = false;

  optim::Algorithm algorithm() const { return fused ? fused->algorithm() : algorithm_of(*torch, "load_checkpoint"); }
  std::string moments() const { return fused ? moments_name(fused->moments()) : kMomentsOfTorch; }
  std::vector<optim::Hyperparameters> options() const { return fused ? fused->all_options() : options_of(*torch); }
};

// The names of the parameters of each group, in the model's order or the optimizer's own.
std::vector<std::vector<std::string>> groups_of(const Request& request, const ModelNames& names) {
  std::vector<std::vector<std::string>> groups(request.options().size());
  if (request.torch != nullptr) {
    for (size_t i = 0; i < groups.size(); ++i) {
      for (const at::Tensor& parameter : request.torch->param_groups()[i].params()) {
        const std::string* const name = names.find(parameter);
        groups[i].push_back(name == nullptr ? "" : *name);
      }
    }
    return groups;
  }
  runtime::ModelOptimizer& core = *request.fused->core();
  for (size_t b = 0; b < core.block_count(); ++b) {
    const std::vector<memory::NamedTensor>& parameters = core.contents(b).state->block->parameters();
    for (size_t p = 0; p < parameters.size(); ++p) {
      const int group = core.block(b).group(p);
      if (group >= 0) groups[static_cast<size_t>(group)].push_back(*names.find(parameters[p].tensor));
    }
  }
  return groups;
}

// The checkpoint's options of each group, for the optimizer. Throws std::invalid_argument if it does not fit.
std::vector<GroupOptions> read_groups(StoredCheckpoint& stored, const Request& request, const ModelNames& names) {
  const json& saved = stored.state().at("optimizer");
  const std::string moments = request.moments(), kind = class_name(request.algorithm());
  if (saved.at("class") != kind || saved.at("moments") != moments) {
    throw std::invalid_argument(concat("[load_checkpoint] ", stored.folder(), " has the state of ",
                                       saved.at("class").get<std::string>(), " with moments ",
                                       saved.at("moments").get<std::string>(), ", expected ", kind, " with ", moments,
                                       "; make the optimizer as it was, or call load_weights"));
  }
  const json& groups = saved.at("param_groups");
  std::vector<std::vector<std::string>> own = groups_of(request, names);
  if (groups.size() != own.size()) {
    throw std::invalid_argument(concat("[load_checkpoint] ", stored.folder(), " has an optimizer of ", groups.size(),
                                       " groups, expected ", own.size(), "; make the optimizer as it was"));
  }
  std::vector<GroupOptions> read;
  for (size_t i = 0; i < groups.size(); ++i) {
    std::vector<std::string> there;
    // torch's optimizers in Python step copies, which have no names: null.
    const json& saved_names = groups[i].at("params");
    for (size_t p = 0; p < saved_names.size(); ++p) {
      const std::string here = p < own[i].size() ? own[i][p] : "";
      there.push_back(saved_names[p].is_string() ? saved_names[p].get<std::string>() : here);
    }
    // Blocks may order parameters otherwise; what each has, it has by its name.
    if (request.fused != nullptr) {
      std::ranges::sort(there);
      std::ranges::sort(own[i]);
    }
    if (there != own[i]) {
      throw std::invalid_argument(concat("[load_checkpoint] group ", i, " of the optimizer in ", stored.folder(),
                                         " has other parameters than this one, expected the same; make the optimizer "
                                         "as it was"));
    }
    read.push_back(decoded(
        stored, groups[i].at("options"), concat("optimizer.param_groups[", i, "]"),
        [&](const StateValue& options) { return read_options(request.algorithm(), options, request.options()[i]); }));
  }
  return read;
}

// Throws std::invalid_argument for a checkpoint that does not fit, before anything is changed.
void check(const StoredCheckpoint& stored, const Request& request, const ModelNames& names,
           const WeightPlaces& places) {
  places.check(names, request.strict);
  if (request.weights_only) return;
  if (stored.nodes() > 1) {
    throw std::invalid_argument(concat("[load_checkpoint] ", stored.folder(), " was saved by ", stored.nodes(),
                                       " nodes, each with its part of the optimizer's state, expected one of a single "
                                       "process; load it from Python and save it there, or call load_weights"));
  }
  const bool has_optimizer = stored.state().contains("optimizer");
  const bool wants_optimizer = request.fused != nullptr || request.torch != nullptr;
  if (has_optimizer != wants_optimizer) {
    throw std::invalid_argument(
        concat("[load_checkpoint] ", stored.folder(), " has ",
               has_optimizer ? stored.state().at("optimizer").at("class").get<std::string>() : "no optimizer",
               ", expected ", has_optimizer ? "the one that steps the model" : "none",
               " as the third argument; or call load_weights to start anew from its weights"));
  }
  if (stored.state().contains("scaler") != (request.scaler != nullptr)) {
    throw std::invalid_argument(concat("[load_checkpoint] ", stored.folder(), " has ",
                                       stored.state().contains("scaler") ? "a scaler" : "no scaler",
                                       ", expected LoadOptions::scaler to be given as at the save"));
  }
  const size_t schedulers = stored.state().contains("lr_schedulers") ? stored.state().at("lr_schedulers").size() : 0;
  const bool has_schedule = request.fused != nullptr && !request.fused->first_rates().empty();
  if (schedulers > 1 || (schedulers == 1) != has_schedule) {
    throw std::invalid_argument(concat("[load_checkpoint] ", stored.folder(), " has ", schedulers,
                                       " learning-rate schedules and the optimizer has ", has_schedule ? 1 : 0,
                                       ", expected as many; call Optimizer::set_learning_rate as at the start"));
  }
}

void load_fused_part(StoredCheckpoint& stored, const Request& request, const ModelNames& names,
                     const WeightPlaces& places, const std::vector<GroupOptions>& groups) {
  std::vector<optim::Hyperparameters> options;
  std::vector<double> first_rates;
  for (const GroupOptions& group : groups) {
    options.push_back(group.options);
    first_rates.push_back(group.first_rate.value_or(group.options.lr));
  }
  request.fused->restore(std::move(options), std::move(first_rates), stored.state().at("steps").get<int64_t>());
  load_fused(
      stored, names, places,
      {*request.fused->core(), request.fused->algorithm(), request.fused->moments(), request.fused->all_options()});
}

// What the checkpoint has beside the weights of a training by libtorch's optimizer.
std::function<void()> read_torch_part(StoredCheckpoint& stored, const Request& request, const ModelNames& names,
                                      const std::vector<GroupOptions>& groups) {
  if (!stored.section(kPrevious).empty()) {
    stored.require_whole({kPrevious});
    throw std::invalid_argument(concat("[load_checkpoint] ", stored.folder(),
                                       " was saved after an asynchronous step, whose weights the next call does not "
                                       "read yet, which optimizers of libtorch do not have; load it from Python"));
  }
  for (const auto& [name, parameter] : names.parameters) {
    const auto copy = stored.section(kOptimizer).find(name + "/copy");
    if (copy == stored.section(kOptimizer).end() || copy->second.dtype == parameter.scalar_type()) continue;
    stored.require_whole({kOptimizer});
    throw std::invalid_argument(concat(
        "[load_checkpoint] the saved optimizer updates a copy of '", name, "' in ", c10::toString(copy->second.dtype),
        ", and the model's is ", parameter.scalar_type(), "; load it from Python, or make the model in that dtype"));
  }
  if (request.torch == nullptr) return [] {};
  std::vector<optim::Hyperparameters> options;
  for (const GroupOptions& group : groups) options.push_back(group.options);
  const std::function<void()> give =
      decoded(stored, stored.state().at("optimizer").at("state_dict"), "optimizer",
              [&](const StateValue& state) { return read_state(*request.torch, state); });
  return [&optimizer = *request.torch, options, give] {
    set_options(optimizer, options);
    give();
  };
}

// Replaces the gradients that no step has consumed by the checkpoint's. Returns whether there are any.
bool load_gradients(const StoredCheckpoint& stored, const ModelNames& names, Model& model) {
  std::map<std::string, at::Tensor> values;
  StoredCheckpoint::Destinations destinations;
  for (const auto& [name, place] : stored.section(kGradients)) {
    values[name] = at::empty(place.shape, place.dtype);
    destinations[kGradients].emplace_back(name, values[name]);
  }
  stored.read(destinations);
  runtime::Pipeline& pipeline = *model.shared_pipeline();
  std::vector<std::vector<at::Tensor>> sums;
  for (const runtime::BlockState& block : pipeline.model().blocks) {
    sums.emplace_back();
    for (const memory::NamedTensor& parameter : block.block->parameters()) {
      const auto found = values.find(*names.find(parameter.tensor));
      sums.back().push_back(found == values.end() ? at::Tensor() : found->second);
    }
  }
  pipeline.gradients().load(sums);
  return !values.empty();
}

// Losses go on in chunks of the size that they had.
void keep_chunks(const json& pipeline, Model& model) {
  const auto member = pipeline.find("chunk_logit_bytes");
  const bool is_said = member != pipeline.end();
  const auto saved = is_said && !member->is_null() ? std::optional(member->get<int64_t>()) : std::nullopt;
  const std::optional<KeptChunks> kept = kept_chunks(is_said, saved, chunk_logit_bytes(model), model.name());
  if (!kept) return;
  model.run_options().chunk_logit_bytes = kept->logit_bytes;
  tell_user(kept->notice);
}

// Restores counters and seeds, and the number of microbatches, which belongs to the bits.
void load_run(const StoredCheckpoint& stored, Model& model) {
  const std::string added = device::changed_fp16_accumulation(stored.state().value("fp16_accumulation", false),
                                                              runtime::Engine::current()->fp16_accumulation());
  if (!added.empty()) tell_user(added);
  const json& pipelines = stored.state().at("pipelines");
  if (!pipelines.contains("")) return;
  const json& saved = pipelines.at("");
  model.set_calls(saved.at("calls").get<uint64_t>());
  model.set_random_seed(saved.at("random_seed").get<uint64_t>());
  keep_chunks(saved, model);
  if (model.arithmetic()) {
    const auto before = saved.find("arithmetic");
    const bool is_said = before != saved.end() && before->is_string();
    const std::string changed =
        changed_arithmetic(is_said ? before->get<std::string>() : "", *model.arithmetic(), model.name());
    if (!changed.empty()) tell_user(changed);
  }
  if (saved.at("num_microbatch").is_null()) return;
  const int count = saved.at("num_microbatch").get<int>();
  const int before =
      model.run_options().microbatches.value_or(default_microbatches(runtime::Engine::current()->pool_size()));
  model.run_options().microbatches = count;
  if (before == count) return;
  tell_user(concat("[load_checkpoint] the number of microbatches of ", model.name(), " is ", count,
                   ", as in the checkpoint, so that results stay the same"));
}

// Throws std::invalid_argument for one that was disabled.
GradScaler::State read_scale(StoredCheckpoint& stored) {
  return decoded(stored, stored.state().at("scaler"), "scaler", [&](const StateValue& saved) {
    if (saved.at("state").entries().empty()) {
      throw std::invalid_argument(concat("[load_checkpoint] ", stored.folder(),
                                         " was saved with a scaler that was disabled, expected one that scales losses; "
                                         "load it from Python"));
    }
    GradScaler::State scale;
    scale.scale = saved.at("state").at("scale").as_double();
    scale.growth_tracker = static_cast<int64_t>(saved.at("state").at("_growth_tracker").as_double());
    const StateValue& front = saved.at("resume").at("front");
    scale.front = front.is_none() ? scale.scale : front.as_double();
    return scale;
  });
}

Loaded load_one(const std::string& folder, const Request& request) {
  Model& model = request.model;
  // First: what earlier work throws says nothing about the checkpoint.
  model.synchronize();
  wait_for_save(model);
  using Scope = StoredCheckpoint::Scope;
  StoredCheckpoint stored(folder, request.weights_only ? Scope::kWeights : Scope::kAll);
  const ModelNames names(model, {});
  const WeightPlaces places(stored, names);
  check(stored, request, names, places);
  Loaded loaded{stored.step(), folder, {}, places.missing(), places.unexpected()};
  if (request.weights_only) {
    places.load({}, {});
    stored.verify_rest();
    if (model.fused_optimizer()) {
      runtime::ModelOptimizer& core = *model.fused_optimizer();
      for (size_t b = 0; b < core.block_count(); ++b) {
        const std::vector<memory::NamedTensor>& parameters = core.contents(b).state->block->parameters();
        for (size_t p = 0; p < parameters.size(); ++p) {
          if (core.block(b).group(p) >= 0) core.block(b).restart_master(p, parameters[p].tensor.detach());
        }
      }
      core.accept_weights();
    }
    return loaded;
  }
  // Everything that may not fit is read before anything is changed.
  for (const auto& [name, entry] : stored.state().at("state").items())
    loaded.state.emplace_back(name, stored.value(entry.begin().value(), "state." + name));
  std::vector<GroupOptions> groups;
  if (stored.state().contains("optimizer")) groups = read_groups(stored, request, names);
  const StateValue random = stored.value(stored.state().at("random"), "random");
  checkpoint::reading(checkpoint::join(folder, kStateFile), [&] { check_random_states(random); });
  GradScaler::State scale;
  if (request.scaler != nullptr) scale = read_scale(stored);
  if (request.fused != nullptr) {
    load_fused_part(stored, request, names, places, groups);
  } else {
    const std::function<void()> give = read_torch_part(stored, request, names, groups);
    places.load({}, {});
    give();
  }
  const bool losses_wait = load_gradients(stored, names, model);
  stored.verify_rest();
  load_run(stored, model);
  if (request.scaler != nullptr) request.scaler->resume(scale, losses_wait);
  restore_random_states(random);
  return loaded;
}

Loaded load(const std::string& folder, const Request& request) {
  require_callers_thread();
  wait_for_saves(folder);
  checkpoint::FallBack fall_back(folder, tell_user);
  while (true) {
    const std::string path = fall_back.next();
    try {
      return load_one(path, request);
    } catch (const checkpoint::DamagedCheckpoint& damage) {
      fall_back.damaged(damage.what());
    }
  }
}

void require_plain(const Model& model) {
  model.require_no_functions("load_checkpoint");
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
  if (model.fused_optimizer() != optimizer.core()) {
    throw std::invalid_argument(
        "[load_checkpoint] the optimizer was not made for this model, or another one was made since, expected the one "
        "that steps it");
  }
  if (optimizer.core()->nodes()) {
    throw std::invalid_argument(
        "[load_checkpoint] the optimizer keeps a part of its state on each of several nodes, expected one node; save "
        "and load such "
        "checkpoints with the Python package");
  }
  return load(folder, {.model = model, .fused = &optimizer, .scaler = options.scaler, .strict = options.strict});
}

Loaded load_checkpoint(const std::string& folder, Model& model, torch::optim::Optimizer& optimizer,
                       const LoadOptions& options) {
  require_plain(model);
  return load(folder, {.model = model, .torch = &optimizer, .scaler = options.scaler, .strict = options.strict});
}

Loaded load_checkpoint(const std::string& folder, Model& model, const LoadOptions& options) {
  require_plain(model);
  return load(folder, {.model = model, .scaler = options.scaler, .strict = options.strict});
}

Loaded load_weights(const std::string& folder, Model& model, bool strict) {
  return load(folder, {.model = model, .strict = strict, .weights_only = true});
}

}  // namespace roundpipe
