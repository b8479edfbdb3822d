#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <roundpipe/api/layer_instance.h>

namespace roundpipe {

// A frozen parameter that the checkpoint leaves out, since it is of another folder.
using LeavesOut = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

// What a checkpoint of a model holds, by the names of its state dict. A tied parameter counts once, under its first
// name.
struct ModelNames {
  // Names in weight files that differ from the model's, by the model's.
  using NamesInFile = std::map<std::string, std::string>;

  NamedParameters parameters;
  NamedParameters buffers;
  std::vector<std::pair<std::string, std::string>> tied;  // another name, and the first one
  std::set<std::string> outside;                          // see LeavesOut; parameters in mapped files are so, too
  NamesInFile in_file;
  bool is_adapter = false;  // the weights are those of an adapter, and its base is outside

  // `named`, `named_buffers`: under every name. `adapter`: of a model with one, the names that its files have for what
  // belongs to it; all else that is frozen is the base.
  ModelNames(const NamedParameters& named, const NamedParameters& named_buffers, const LeavesOut& leaves_out,
             const std::optional<NamesInFile>& adapter = std::nullopt);
  // The name of a parameter; null for any other tensor.
  const std::string* find(const at::Tensor& parameter) const;
  // Of a parameter or buffer, in the weight files.
  const std::string& file_name(const std::string& name) const;

 private:
  std::unordered_map<const c10::TensorImpl*, size_t> numbers_;  // of parameters
};

// A shape as Python prints it.
std::string tuple_text(at::IntArrayRef sizes);

// A checksum of a tensor's shape, dtype, and its first, middle and last bytes.
std::string sampled_checksum(const at::Tensor& tensor);

}  // namespace roundpipe
