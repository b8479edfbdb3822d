#include <roundpipe/runtime/model/parameter_watch.h>

#include <roundpipe/core/error.h>

namespace roundpipe::runtime {

ParameterWatch::ParameterWatch(std::vector<at::Tensor> parameters, const std::vector<char>& with_values)
    : parameters_(std::move(parameters)) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    marks_.push_back(mark_of(parameters_[i]));
    fingerprints_.push_back(with_values[i] != 0 ? std::optional<ValueFingerprint>(parameters_[i]) : std::nullopt);
  }
}

ParameterWatch::Mark ParameterWatch::mark_of(const at::Tensor& parameter) {
  const bool has_version = !parameter.is_inference();
  return {has_version ? static_cast<uint32_t>(parameter._version()) : 0, parameter.const_data_ptr()};
}

bool ParameterWatch::touched(size_t index) const {
  const Mark now = mark_of(parameters_[index]);
  return now.version != marks_[index].version || now.place != marks_[index].place;
}

bool ParameterWatch::look(size_t index) {
  marks_[index] = mark_of(parameters_[index]);
  return ValueFingerprint(parameters_[index]).same_as(*fingerprints_[index]);
}

void ParameterWatch::moved() {
  for (size_t i = 0; i < parameters_.size(); ++i) marks_[i].place = parameters_[i].const_data_ptr();
}

void ParameterWatch::require_kept(const std::string& layer, const std::vector<std::string>& names) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!look(i)) throw written_parameter(layer, names.at(i));
  }
}

std::invalid_argument written_parameter(const std::string& layer, const std::string& parameter) {
  return std::invalid_argument(
      concat("[forward] ", layer, " changes its parameter '", parameter,
             "' in its forward, expected one that leaves its parameters as they are: devices run it over copies of "
             "them, where the change would be lost. Change values between calls, after synchronize(); for an "
             "embedding with max_norm, scale its rows there"));
}

}  // namespace roundpipe::runtime
