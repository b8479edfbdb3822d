#include <roundpipe/runs/capture.h>

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <unordered_map>

#include <roundpipe/core/error.h>
#include <roundpipe/runs/random_states.h>
#include <roundpipe/runtime/engine.h>

namespace roundpipe {

using nlohmann::ordered_json;
using saving::Snapshot;

namespace {

template <typename T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

ordered_json encoded(StateEncoder& encoder, const GivenValue& given, const std::string& path) {
  return {{given.is_state_dict ? "state_dict" : "value", encoder.encode(given.value, path)}};
}

}  // namespace

Capture::Capture(ModelNames names, const std::vector<TrainedModel>& models, CapturedRun run)
    : names_(std::move(names)), contents_(std::make_shared<Contents>(run.rank, run.size, names_.is_adapter)) {
  for (const TrainedModel& model : models) model.pipeline->wait_buffers();
  const bool apart = names_.is_adapter || run.rank > 0;
  for (const auto& [name, buffer] : names_.buffers)
    contents_->add(apart ? kBuffers : kWeights, {names_.file_name(name), buffer.detach().clone()});
  ordered_json& pipelines = own()["pipelines"] = ordered_json::object();
  for (const TrainedModel& model : models) {
    pipelines[model.path] = {
        {"calls", model.pipeline->calls()},
        {"random_seed", model.pipeline->random_seed()},
        {"num_microbatch", or_null(model.microbatches)},
        {"chunk_logit_bytes", or_null(model.chunk_logit_bytes)},
        {"arithmetic", model.arithmetic.empty() ? ordered_json(nullptr) : ordered_json(model.arithmetic)}};
  }
  own()["random"] = contents_->own_encoder().encode(random_states(std::move(run.other_random_states)), "random");
  if (run.loss_counts) own()["loss_counts"] = *run.loss_counts;
  const std::shared_ptr<runtime::Engine> pool = runtime::Engine::current();
  common_["step"] = run.step;
  common_["steps"] = run.steps;
  ordered_json& versions = common_["versions"] = ordered_json::object();
  for (const auto& [name, version] : run.versions) versions[name] = version;
  common_["devices"] = pool->pool_size();
  common_["fp16_accumulation"] = pool->fp16_accumulation();
  ordered_json dtypes = ordered_json::object(), outside = ordered_json::object(), tied = ordered_json::object();
  for (const auto& [name, parameter] : names_.parameters) {
    dtypes[name] = c10::getDtypeNames(parameter.scalar_type()).first;
    if (names_.outside.contains(name)) outside[name] = sampled_checksum(parameter);
  }
  for (const auto& [name, first] : names_.tied) tied[name] = first;
  common_["dtypes"] = std::move(dtypes);
  common_["outside"] = std::move(outside);
  common_["tied"] = std::move(tied);
}

void Capture::take_schedulers(const std::vector<GivenValue>& schedulers) {
  ordered_json states = ordered_json::array();
  for (size_t i = 0; i < schedulers.size(); ++i)
    states.push_back(roundpipe::encoded(contents_->encoder(), schedulers[i], concat("lr_schedulers[", i, "]")));
  if (!schedulers.empty()) common_["lr_schedulers"] = std::move(states);
}

void Capture::take_values(const std::vector<std::pair<std::string, GivenValue>>& values) {
  ordered_json states = ordered_json::object();
  for (const auto& [name, given] : values) {
    if (states.contains(name)) {
      throw std::invalid_argument(
          concat("[save_checkpoint] the state has '", name, "' twice, expected each name once; rename one"));
    }
    states[name] = roundpipe::encoded(contents_->own_encoder(), given, "state." + name);
  }
  own()["state"] = std::move(states);
}

ordered_json Capture::encoded(const TrainedOptimizer& optimizer) {
  ordered_json groups = ordered_json::array();
  for (size_t i = 0; i < optimizer.groups.size(); ++i) {
    const TrainedOptimizer::Group& group = optimizer.groups[i];
    ordered_json params = ordered_json::array();
    for (const at::Tensor& parameter : group.parameters) {
      const std::string* const name = names_.find(parameter);  // copies and tensors of the program have none
      params.push_back(name == nullptr ? ordered_json(nullptr) : ordered_json(*name));
    }
    groups.push_back(
        {{"options", contents_->encoder().encode(group.options, concat("optimizer.param_groups[", i, "]"))},
         {"params", std::move(params)}});
  }
  return {{"class", optimizer.class_name}, {"moments", optimizer.moments}, {"param_groups", std::move(groups)}};
}

void Capture::take(const FusedOptimizer& fused, const TrainedOptimizer& optimizer,
                   std::shared_ptr<saving::SnapshotMemory> memory) {
  const bool is_first = contents_->rank() == 0;
  Contents::Places places;
  std::set<std::string> covered;
  std::map<std::string, optim::ElementRange> shards;  // of trained parameters
  for (size_t b = 0; b < fused.core->block_count(); ++b) {
    const runtime::ModelOptimizer::BlockContents block = fused.core->contents(b);
    const std::vector<memory::NamedTensor>& parameters = block.state->block->parameters();
    for (size_t p = 0; p < parameters.size(); ++p) {
      const std::string& name = *names_.find(parameters[p].tensor);
      Contents::PlaceNames& place = places[{b, p}] = {name, names_.file_name(name), {}};
      if (block.optimizer->trains_any()) covered.insert(name);
      const int group = block.optimizer->group(p);
      if (group < 0) continue;
      shards[name] = block.optimizer->shard(p);
      place.moments = optim::state_names(fused.algorithm, fused.options.at(static_cast<size_t>(group)), fused.moments,
                                         parameters[p].tensor.sizes());
    }
  }
  common_["optimizer"] = encoded(optimizer);
  if (contents_->size() > 1) {
    ordered_json ranges = ordered_json::object();
    for (const auto& [name, parameter] : names_.parameters) {
      const auto shard = shards.find(name);
      if (shard != shards.end()) ranges[name] = {shard->second.first, shard->second.last};
    }
    own_["ranges"] = std::move(ranges);
    own_["strides"] = ordered_json::object();
  }
  contents_->set_snapshot(Snapshot::of(*fused.core, std::move(memory), fused.core, /*with_weights=*/is_first),
                          std::move(places));
  for (const auto& [name, parameter] : names_.parameters) {
    if (is_first && !covered.contains(name) && !names_.outside.contains(name))
      contents_->add(kWeights, {names_.file_name(name), parameter.detach()});
  }
  take_shown_gradients();
}

void Capture::take(const std::vector<TrainedModel>& models, CopySteps* copies, const TrainedOptimizer* optimizer,
                   const StateValue& state_dict) {
  if (copies != nullptr) copies->take_writes();
  // A model's own parameters may still show weights from before those that calls read.
  std::unordered_map<const c10::TensorImpl*, at::Tensor> read;
  for (const TrainedModel& model : models) {
    const std::vector<std::vector<at::Tensor>> weights = model.pipeline->weights().read_by_calls();
    const auto& blocks = model.pipeline->model().blocks;
    for (size_t b = 0; b < blocks.size(); ++b) {
      const std::vector<memory::NamedTensor>& parameters = blocks[b].block->parameters();
      for (size_t p = 0; p < parameters.size(); ++p) read[parameters[p].tensor.unsafeGetTensorImpl()] = weights[b][p];
    }
  }
  const bool unpublished = copies != nullptr && copies->unpublished();
  for (const auto& [name, parameter] : names_.parameters) {
    if (names_.outside.contains(name)) continue;
    const auto found = read.find(parameter.unsafeGetTensorImpl());
    const at::Tensor weights = found == read.end() ? parameter.detach() : found->second;
    const at::Tensor copy = copies == nullptr ? at::Tensor() : copies->copy_of(parameter);
    if (!copy.defined()) {
      if (contents_->rank() == 0) contents_->add(kWeights, {names_.file_name(name), weights});
      continue;
    }
    contents_->add(kWeights, {names_.file_name(name), weights, std::nullopt, copy.detach()});
    contents_->add(kOptimizer, {concat(name, "/", kCopy), copy.detach()});
    if (unpublished) contents_->add(kPrevious, {name, weights});
    if (copy.grad().defined()) contents_->add(kOptimizer, {concat(name, "/", kCopyGradient), copy.grad()});
  }
  if (optimizer != nullptr) {
    ordered_json entry = encoded(*optimizer);
    entry["state_dict"] = contents_->encoder().encode(state_dict, "optimizer", /*copies_tensors=*/false);
    common_["optimizer"] = std::move(entry);
  }
  for (const TrainedModel& model : models) model.pipeline->gradients().gather();
  take_shown_gradients();
  const auto has_gradients = [](const TrainedModel& model) { return model.pipeline->gradients().any(); };
  if (std::ranges::none_of(models, has_gradients)) return;
  for (const TrainedModel& model : models) model.pipeline->drain();
  for (const TrainedModel& model : models) {
    const std::vector<std::vector<at::Tensor>> sums = model.pipeline->gradients().summed();
    const auto& blocks = model.pipeline->model().blocks;
    for (size_t b = 0; b < blocks.size(); ++b) {
      const std::vector<memory::NamedTensor>& parameters = blocks[b].block->parameters();
      for (size_t p = 0; p < parameters.size(); ++p) {
        const at::Tensor& parameter = parameters[p].tensor;
        if (sums[b][p].defined() && !parameter.grad().defined())
          contents_->add(kGradients, {*names_.find(parameter), sums[b][p]});
      }
    }
  }
}

void Capture::take_shown_gradients() {
  for (const auto& [name, parameter] : names_.parameters) {
    if (parameter.grad().defined()) contents_->add(kGradients, {name, parameter.grad().detach().clone()});
  }
}

void Capture::finish() {
  if (scaler_) common_["scaler"] = contents_->encoder().encode(scaler_(), "scaler");
  if (contents_->snapshot() != nullptr) {
    Contents::SnapshotState state = contents_->take_snapshot();
    if (contents_->size() > 1) own_["strides"] = std::move(state.strides);
    own()["counters"] = std::move(state.counters);
    if (state.last_norm) own()["last_norm"] = *state.last_norm;
  }
  contents_->set_states(common_, own_);
}

void Capture::cancel() {
  if (contents_->snapshot() != nullptr) contents_->snapshot()->cancel();
}

}  // namespace roundpipe
