#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/runtime/model/value_fingerprint.h>

namespace roundpipe::runtime {

// Finds parameters that the code of a layer writes. Layers run over copies of their weights, where such a write would
// be lost, so it is an error.
//
// A write in place raises the tensor's version, but so does code that changes nothing; a write to `.data`, or a new
// tensor there, raises none. So versions and places only say which values to compare, and values may be compared
// without them. The thread that computes on the parameters.
class ParameterWatch {
 public:
  // `with_values`: [parameter]: whether changes of its values can be told.
  ParameterWatch(std::vector<at::Tensor> parameters, const std::vector<char>& with_values);

  // Since the last look at it: whether parameter `index` may have been written, by its version and place.
  bool touched(size_t index) const;
  bool has_values(size_t index) const { return fingerprints_[index].has_value(); }
  // Looks at a parameter: whether its values are still the first ones. REQUIRES: has_values.
  bool look(size_t index);
  // Says that the parameters, with the same values, are elsewhere now.
  void moved();

  // Looks at all parameters. Throws written_parameter() for the first whose values have changed.
  // REQUIRES: has_values() of all. `layer`: for the error; `names`: of the parameters.
  void require_kept(const std::string& layer, const std::vector<std::string>& names);

 private:
  struct Mark {
    uint32_t version;
    const void* place;
  };
  static Mark mark_of(const at::Tensor& parameter);

  std::vector<at::Tensor> parameters_;
  std::vector<Mark> marks_;
  std::vector<std::optional<ValueFingerprint>> fingerprints_;
};

// The error of a layer that writes a parameter.
std::invalid_argument written_parameter(const std::string& layer, const std::string& parameter);

}  // namespace roundpipe::runtime
