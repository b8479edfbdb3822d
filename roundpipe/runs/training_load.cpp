#include <roundpipe/runs/training_load.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <unordered_set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <roundpipe/core/arithmetic.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/core/loss_chunks.h>
#include <roundpipe/device/fp16_accumulation.h>
#include <roundpipe/files/damage.h>
#include <roundpipe/runs/load_fused.h>
#include <roundpipe/runs/random_states.h>
#include <roundpipe/runtime/engine.h>
#include <roundpipe/saving/contents.h>

namespace roundpipe {

using nlohmann::json;

TrainingLoad::TrainingLoad(const std::string& folder, LoadedTraining training)
    : training_(std::move(training)),
      stored_(folder, training_.weights_only ? StoredCheckpoint::Scope::kWeights : StoredCheckpoint::Scope::kAll),
      places_(stored_, training_.names) {
  if (!training_.weights_only) own_.emplace(stored_, training_.rank, training_.size);
  places_.check(training_.names, training_.strict);
  if (training_.weights_only) return;
  check();
  if (training_.has_scaler) scaler_ = stored_.value(stored_.state().at("scaler"), "scaler");
  if (training_.scales && scaler_.at("state").entries().empty()) {
    throw std::invalid_argument(concat("[load_checkpoint] ", stored_.folder(),
                                       " was saved with a scaler that was disabled, expected ",
                                       training_.words.disabled_scaler));
  }
  random_ = own_->random_states();
  files::reading(files::join(folder, kStateFile), [&] { check_random_states(random_); });
}

// Throws std::invalid_argument for a training that does not fit.
void TrainingLoad::check() {
  const json& state = stored_.state();
  const LoadWords& words = training_.words;
  const auto refuse = [&](const auto&... what) {
    throw std::invalid_argument(concat("[load_checkpoint] ", stored_.folder(), " has ", what...));
  };
  const bool has_optimizer = state.contains("optimizer");
  if (has_optimizer != training_.optimizer.has_value()) {
    refuse(has_optimizer ? state.at("optimizer").at("class").get<std::string>() : "no optimizer", ", expected ",
           has_optimizer ? "the one that steps the model" : "none", " as the third argument; or ", words.weights_only,
           " to start anew from its weights");
  }
  if (has_optimizer) {
    const json& saved = state.at("optimizer");
    const TrainedOptimizer& ours = *training_.optimizer;
    const auto kind = saved.at("class").get<std::string>(), moments = saved.at("moments").get<std::string>();
    if (kind != ours.class_name || moments != ours.moments) {
      refuse("the state of ", kind, " with moments ", frontend().quoted(moments), ", expected ", ours.class_name,
             " with ", frontend().quoted(ours.moments), "; make the optimizer as it was, or ", words.weights_only);
    }
  }
  const size_t schedules = state.contains("lr_schedulers") ? state.at("lr_schedulers").size() : 0;
  if (schedules != training_.schedules)
    refuse(schedules, " ", words.schedules_before, training_.schedules, words.schedules_after);
  if (state.contains("scaler") != training_.has_scaler) {
    refuse(state.contains("scaler") ? "a scaler" : "no scaler", ", expected ", words.scaler,
           " to be given as at the save");
  }
  own_->check(training_.strict);
  std::vector<std::string> absent;
  std::ranges::copy_if(training_.takers, std::back_inserter(absent), [&](const std::string& name) {
    return std::ranges::find(own_->names(), name) == own_->names().end() &&
           std::ranges::find(own_->differing(), name) == own_->differing().end();
  });
  if (!absent.empty())
    refuse("no state ", some_names(absent), ", expected names of its own: ", some_names(own_->names()));
  if (has_optimizer) check_groups();
}

namespace {

// " ('a' is in this one alone)": the first parameter that is in one group only; empty: there is none.
std::string group_difference(const ModelNames& names, const json& saved, const std::vector<at::Tensor>& own) {
  std::set<std::string> left, right;
  for (const json& name : saved) {
    if (!name.is_null()) left.insert(name.get<std::string>());
  }
  for (const at::Tensor& parameter : own) {
    if (const std::string* const name = names.find(parameter)) right.insert(*name);
  }
  for (const std::string& name : left) {
    if (!right.contains(name)) return concat(" ('", name, "' is in the checkpoint's alone)");
  }
  for (const std::string& name : right) {
    if (!left.contains(name)) return concat(" ('", name, "' is in this one alone)");
  }
  return "";
}

}  // namespace

void TrainingLoad::check_groups() const {
  const json& saved = stored_.state().at("optimizer").at("param_groups");
  const std::vector<TrainedOptimizer::Group>& groups = training_.optimizer->groups;
  if (saved.size() != groups.size()) {
    throw std::invalid_argument(concat("[load_checkpoint] ", stored_.folder(), " has an optimizer of ", saved.size(),
                                       " groups, expected ", groups.size(), "; make the optimizer as it was"));
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    const json& there = saved[i].at("params");
    const std::vector<at::Tensor>& here = groups[i].parameters;
    bool fits = there.size() == here.size();
    std::multiset<std::string> left, right;
    for (size_t p = 0; fits && p < there.size(); ++p) {
      const std::string* const name = training_.names.find(here[p]);
      // Copies that an optimizer steps have no names.
      if (name == nullptr || there[p].is_null()) continue;
      left.insert(there[p].get<std::string>());
      right.insert(*name);
      fits = training_.is_fused || there[p] == *name;
    }
    // What a fused optimizer has of each parameter, it has by its name.
    if (fits && left == right) continue;
    throw std::invalid_argument(
        concat("[load_checkpoint] group ", i, " of the optimizer in ", stored_.folder(),
               " has other parameters than this one", group_difference(training_.names, there, here), ", expected ",
               training_.words.same_parameters, ", and groups in the same order; make the optimizer as it was"));
  }
}

StateValue TrainingLoad::group_options(size_t group) {
  return stored_.value(stored_.state().at("optimizer").at("param_groups").at(group).at("options"), group_path(group));
}

StateValue TrainingLoad::optimizer_state() {
  const json& saved = stored_.state().at("optimizer");
  return saved.contains("state_dict") ? stored_.value(saved.at("state_dict"), "optimizer") : StateValue();
}

StateValue TrainingLoad::schedule(size_t index) {
  const json& saved = stored_.state().at("lr_schedulers").at(index);
  return stored_.value(saved.begin().value(), concat("lr_schedulers[", index, "]"));
}

std::vector<std::pair<std::string, StateValue>> TrainingLoad::values() const {
  std::vector<std::pair<std::string, StateValue>> values;
  for (const std::string& name : own_->names()) values.emplace_back(name, own_->value(name));
  return values;
}

void TrainingLoad::load_weights(runtime::ModelOptimizer* fused) {
  places_.load({}, {});
  stored_.verify_rest(training_.rank, training_.size);
  if (fused == nullptr) return;
  for (size_t b = 0; b < fused->block_count(); ++b) {
    std::vector<size_t> trained;
    for (size_t p = 0; p < fused->block(b).parameters(); ++p) {
      if (fused->block(b).group(p) >= 0) trained.push_back(p);
    }
    fused->restart_masters(b, trained);
  }
  fused->accept_weights();
}

void TrainingLoad::load(const FusedOptimizer& fused) {
  load_fused(stored_, training_.names, places_, fused, /*is_shared=*/training_.size > 1);
}

void TrainingLoad::load(CopySteps* copies) {
  const StoredCheckpoint::Section& kept = stored_.section(kOptimizer);
  StoredCheckpoint::Destinations beside;
  std::set<std::string> read_by_calls;  // weights from before the last step
  std::vector<std::pair<at::Tensor, at::Tensor>> from_weights;
  for (const auto& [name, parameter] : training_.names.parameters) {
    const at::Tensor copy = copies == nullptr ? at::Tensor() : copies->copy_of(parameter);
    if (!copy.defined()) continue;
    copy.mutable_grad().reset();
    const std::string in_file = concat(name, "/", kCopy), gradient = concat(name, "/", kCopyGradient);
    if (!kept.contains(in_file)) {  // of an optimizer that stepped the model's own parameters
      from_weights.emplace_back(copy.detach(), parameter.detach());
      continue;
    }
    beside[kOptimizer].emplace_back(in_file, copy.detach());
    if (stored_.section(kPrevious).contains(name)) {
      beside[kPrevious].emplace_back(name, parameter.detach());
      if (places_.sources().contains(name)) read_by_calls.insert(name);
    }
    if (!kept.contains(gradient)) continue;
    copy.mutable_grad() = at::empty_like(copy.detach());
    beside[kOptimizer].emplace_back(gradient, copy.grad());
  }
  const bool unpublished = beside.contains(kPrevious);
  places_.load(read_by_calls, std::move(beside));
  const at::NoGradGuard no_grad;
  for (const auto& [copy, weights] : from_weights) copy.copy_(weights);
  if (copies != nullptr) copies->accept_loaded(unpublished);
}

// Replaces the gradients that no step has consumed by the checkpoint's.
void TrainingLoad::load_gradients() {
  std::map<std::string, at::Tensor> values;
  StoredCheckpoint::FileDestinations destinations;
  for (const auto& [name, place] : own_->gradients()) {
    values[name] = at::empty(place.shape, place.dtype);
    destinations[place.file].emplace_back(name, values[name]);
  }
  stored_.read_files(destinations);
  std::unordered_set<std::string> in_pipelines;
  const auto value_of = [&](const std::string& name) {
    const auto found = values.find(name);
    return found == values.end() ? at::Tensor() : found->second;
  };
  for (const std::shared_ptr<runtime::Pipeline>& pipeline : training_.pipelines) {
    std::vector<std::vector<at::Tensor>> sums;
    for (const runtime::BlockState& block : pipeline->model().blocks) {
      sums.emplace_back();
      for (const memory::NamedTensor& parameter : block.block->parameters()) {
        const std::string& name = *training_.names.find(parameter.tensor);
        in_pipelines.insert(name);
        sums.back().push_back(value_of(name));
      }
    }
    pipeline->gradients().load(sums);
  }
  for (const auto& [name, parameter] : training_.names.parameters) {
    if (!in_pipelines.contains(name)) parameter.mutable_grad() = value_of(name);
  }
}

// Restores counters and seeds.
LoadedModel TrainingLoad::load_model(const TrainedModel& model,
                                     const std::function<void(const std::string& line)>& tell) {
  const json* const found = own_->model(model.path);
  if (found == nullptr) return {};
  const json& saved = *found;
  LoadedModel loaded;
  model.pipeline->set_calls(saved.at("calls").get<uint64_t>());
  model.pipeline->set_random_seed(saved.at("random_seed").get<uint64_t>());
  loaded.seed_is_another_s = !own_->has_seed(model.path);
  const auto chunks = saved.find("chunk_logit_bytes");
  const bool is_said = chunks != saved.end();
  const auto bytes = is_said && !chunks->is_null() ? std::optional(chunks->get<int64_t>()) : std::nullopt;
  if (const std::optional<KeptChunks> kept = kept_chunks(is_said, bytes, model.chunk_logit_bytes, model.name)) {
    loaded.chunk_logit_bytes = kept->logit_bytes;
    tell(kept->notice);
  }
  if (!model.arithmetic.empty()) {
    const auto before = saved.find("arithmetic");
    const std::string changed =
        changed_arithmetic(before != saved.end() && before->is_string() ? before->get<std::string>() : "",
                           parse_arithmetic(model.arithmetic), model.name);
    if (!changed.empty()) tell(changed);
  }
  if (saved.at("num_microbatch").is_null()) return loaded;
  // It belongs to the bits.
  loaded.microbatches = saved.at("num_microbatch").get<int>();
  if (model.microbatches && model.microbatches != loaded.microbatches) {
    tell(concat("[load_checkpoint] ", training_.words.microbatches, " of ", model.name, " is ", *loaded.microbatches,
                ", as in the checkpoint, so that results stay the same"));
  }
  return loaded;
}

std::vector<LoadedModel> TrainingLoad::load_rest(const std::function<void(const std::string& line)>& tell) {
  std::map<std::string, at::Tensor> buffers;
  for (const auto& [name, buffer] : training_.names.buffers) buffers[training_.names.file_name(name)] = buffer;
  StoredCheckpoint::FileDestinations own_buffers;
  for (const auto& [name, place] : own_->buffers()) {
    if (buffers.contains(name)) own_buffers[place.file].emplace_back(name, buffers[name]);
  }
  stored_.read_files(own_buffers);
  load_gradients();
  stored_.verify_rest(training_.rank, training_.size);
  const std::string added = device::changed_fp16_accumulation(stored_.state().value("fp16_accumulation", false),
                                                              runtime::Engine::current()->fp16_accumulation());
  if (!added.empty()) tell(added);
  std::vector<LoadedModel> loaded;
  for (const TrainedModel& model : training_.models) loaded.push_back(load_model(model, tell));
  return loaded;
}

}  // namespace roundpipe
