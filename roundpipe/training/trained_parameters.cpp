#include <roundpipe/training/trained_parameters.h>

namespace roundpipe {

TrainedParameters::TrainedParameters(Named named) : named_(std::move(named)) {
  for (const auto& [name, parameter] : named_) {
    if (parameter.requires_grad()) trained_.insert(parameter.unsafeGetTensorImpl());
  }
}

std::optional<std::string> TrainedParameters::late() const {
  for (const auto& [name, parameter] : named_) {
    if (parameter.requires_grad() && !has(parameter)) return name;
  }
  return std::nullopt;
}

}  // namespace roundpipe
