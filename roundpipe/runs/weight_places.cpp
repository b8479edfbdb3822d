#include <roundpipe/runs/weight_places.h>

#include <ATen/core/grad_mode.h>

#include <roundpipe/core/error.h>

namespace roundpipe {

WeightPlaces::WeightPlaces(const StoredCheckpoint& stored, const ModelNames& names) : stored_(stored) {
  for (const NamedParameters* const tensors : {&names.parameters, &names.buffers})
    targets_.insert(tensors->begin(), tensors->end());
  std::set<Source> used;
  for (const auto& [name, target] : targets_) {
    std::vector<std::string> candidates{name};
    if (stored.state().at("tied").contains(name))
      candidates.push_back(stored.state().at("tied").at(name).get<std::string>());
    for (const std::string& candidate : candidates) {
      for (const char* const section : {kWeights, kBuffers}) {
        if (sources_.contains(name) || !stored.section(section).contains(candidate)) continue;
        sources_[name] = {section, candidate};
        used.insert({section, candidate});
      }
    }
    const bool elsewhere = names.outside.contains(name) || stored.state().at("outside").contains(name);
    if (!sources_.contains(name) && !elsewhere) missing_.push_back(name);
  }
  for (const char* const section : {kWeights, kBuffers}) {
    for (const auto& [name, place] : stored.section(section)) {
      if (!used.contains({section, name})) unexpected_.push_back(name);
    }
  }
}

void WeightPlaces::check_shapes() const {
  for (const auto& [name, source] : sources_) {
    const std::vector<int64_t>& shape = stored_.section(source.first).at(source.second).shape;
    if (targets_.at(name).sizes() == at::IntArrayRef(shape)) continue;
    stored_.require_whole({source.first});
    throw std::invalid_argument(concat("[load_checkpoint] '", name, "' has shape ", at::IntArrayRef(shape), " in ",
                                       stored_.folder(), ", expected ", targets_.at(name).sizes(),
                                       "; load it into the model that was saved"));
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
  for (const auto& [name, source] : sources_) {
    if (except_for.contains(name)) continue;
    const at::Tensor target = targets_.at(name).detach();
    const auto [found, is_first] = taken.emplace(source, target);
    if (is_first)
      beside[source.first].emplace_back(source.second, target);
    else
      again.emplace_back(target, found->second);
  }
  stored_.read(beside);
  const at::NoGradGuard no_grad;
  for (const auto& [target, from] : again) target.copy_(from);
  for (const auto& [name, source] : sources_) targets_.at(name).unsafeGetTensorImpl()->bump_version();
}

}  // namespace roundpipe
