#pragma once

#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe {

// The parameters that an optimizer updates, among those of its models: those that required grad when it was made.
// Thread safety: the caller's thread.
class TrainedParameters {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;

  TrainedParameters() = default;
  // `named`: every parameter under every name.
  explicit TrainedParameters(Named named);

  bool has(const at::Tensor& parameter) const { return trained_.contains(parameter.unsafeGetTensorImpl()); }
  // The name of a parameter that has become trainable since, so that nothing would update it.
  std::optional<std::string> late() const;

 private:
  Named named_;
  std::unordered_set<const c10::TensorImpl*> trained_;
};

}  // namespace roundpipe
