#include <roundpipe/runs/weight_places.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>

#include <roundpipe/core/error.h>
#include <roundpipe/saving/contents.h>

namespace roundpipe {

std::string some_names(const std::vector<std::string>& names) {
  if (names.empty()) return "nothing";
  std::string shown;
  for (size_t i = 0; i < std::min<size_t>(names.size(), 4); ++i)
    shown += concat(i == 0 ? "" : ", ", "'", names[i], "'");
  return names.size() > 4 ? concat(shown, " and ", names.size() - 4, " more") : shown;
}

WeightPlaces::WeightPlaces(const StoredCheckpoint& stored, const ModelNames& names) : stored_(stored) {
  for (const NamedParameters* const tensors : {&names.buffers, &names.parameters})
    targets_.insert(targets_.end(), tensors->begin(), tensors->end());
  const nlohmann::json &tied = stored.state().at("tied"), &outside = stored.state().at("outside");
  std::set<Source> used;
  for (const auto& [name, target] : targets_) {
    std::vector<std::string> candidates{names.file_name(name)};
    if (tied.contains(name)) candidates.push_back(names.file_name(tied.at(name).get<std::string>()));
    for (const std::string& candidate : candidates) {
      for (const char* const section : {kWeights, kBuffers}) {
        if (sources_.contains(name) || !stored.section(section).contains(candidate)) continue;
        sources_[name] = {section, candidate};
        used.insert({section, candidate});
      }
    }
    if (!sources_.contains(name) && !outside.contains(name)) missing_.push_back(name);
  }
  for (const char* const section : {kWeights, kBuffers}) {
    for (const auto& [name, place] : stored.section(section)) {
      if (!used.contains({section, name})) unexpected_.push_back(name);
    }
  }
  for (const auto& [name, checksum] : outside.items()) {
    if (std::ranges::none_of(targets_, [&](const auto& target) { return target.first == name; }))
      unexpected_.push_back(name);
  }
  std::ranges::sort(unexpected_);
}

void WeightPlaces::check(const ModelNames& names, bool strict) const {
  if (strict && (!missing_.empty() || !unexpected_.empty())) {
    stored_.require_whole({kWeights, kBuffers});
    throw std::invalid_argument(concat("[load_checkpoint] ", stored_.folder(), " lacks ", some_names(missing_),
                                       " of the model and has ", some_names(unexpected_),
                                       " that the model lacks, expected a checkpoint of this model; give strict=False "
                                       "to load what fits"));
  }
  for (const auto& [name, target] : targets_) {
    const auto source = sources_.find(name);
    if (source == sources_.end()) continue;
    const auto& [section, in_file] = source->second;
    const std::vector<int64_t>& shape = stored_.section(section).at(in_file).shape;
    if (target.sizes() == at::IntArrayRef(shape)) continue;
    stored_.require_whole({section});
    throw std::invalid_argument(concat("[load_checkpoint] '", name, "' has shape ", tuple_text(shape), " in ",
                                       stored_.folder(), ", expected ", tuple_text(target.sizes()),
                                       "; load it into the model that was saved"));
  }
  const nlohmann::json& outside = stored_.state().at("outside");
  for (const auto& [name, parameter] : names.parameters) {
    if (!outside.contains(name) || outside.at(name) == sampled_checksum(parameter)) continue;
    throw std::invalid_argument(concat("[load_checkpoint] the frozen parameter '", name,
                                       "' has other values than when ", stored_.folder(),
                                       " was saved, expected the same base, which the checkpoint does not hold; load "
                                       "that base first"));
  }
}

c10::ScalarType WeightPlaces::dtype(const std::string& name) const {
  const Source& source = sources_.at(name);
  return stored_.section(source.first).at(source.second).dtype;
}

void WeightPlaces::load(const std::set<std::string>& except_for, StoredCheckpoint::Destinations beside) const {
  std::map<Source, at::Tensor> taken;
  for (const auto& [section, tensors] : beside) {
    for (const auto& [name, tensor] : tensors) taken[{section, name}] = tensor;
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> again;
  for (const auto& [name, whole] : targets_) {
    const auto found_source = sources_.find(name);
    if (found_source == sources_.end() || except_for.contains(name)) continue;
    const Source& source = found_source->second;
    const at::Tensor target = whole.detach();
    const auto [found, is_first] = taken.emplace(source, target);
    if (is_first)
      beside[source.first].emplace_back(source.second, target);
    else
      again.emplace_back(target, found->second);
  }
  stored_.read(beside);
  const at::NoGradGuard no_grad;
  for (const auto& [target, from] : again) target.copy_(from);
  for (const auto& [name, target] : targets_) {
    if (sources_.contains(name)) target.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace roundpipe
