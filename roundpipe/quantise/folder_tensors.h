#pragma once

#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include <roundpipe/core/error.h>
#include <roundpipe/files/safetensors.h>
#include <roundpipe/quantise/format.h>

// What the readers of the published ways to store encoded weights share. Private to this level's sources.
namespace roundpipe::quantise {

// A small tensor of the files, on the host.
using ReadTensor = std::function<at::Tensor(const std::string& name)>;

// The tensors of a model's files, by name.
class FolderTensors {
 public:
  FolderTensors(const std::vector<files::TensorEntry>& tensors, const ReadTensor& read);

  // Their names, sorted.
  const std::map<std::string, files::TensorEntry>& all() const { return tensors_; }
  bool has(const std::string& name) const { return tensors_.contains(name); }
  // Throws std::invalid_argument unless it is there with one of these dtypes. `of`: the weight that asks for it.
  const files::TensorEntry& at(const std::string& name, const std::string& of,
                               const std::vector<std::string>& dtypes) const;
  // The same, with so many numbers.
  const files::TensorEntry& at(const std::string& name, const std::string& of, const std::vector<std::string>& dtypes,
                               int64_t count) const;
  // The numbers of a small tensor, on the host.
  at::Tensor read(const std::string& name) const { return read_(name); }

 private:
  std::map<std::string, files::TensorEntry> tensors_;
  const ReadTensor& read_;
};

// Throws std::invalid_argument that begins with "[quantised folder] " and the name.
template <typename... Parts>
[[noreturn]] void refuse_stored(const std::string& name, const Parts&... parts) {
  throw std::invalid_argument(concat("[quantised folder] ", name, " ", parts...));
}

// What files' errors name in brackets.
inline std::string place(const std::string& name) { return "quantised folder: " + name; }

// Throws unless a format has a form for a weight of these sizes.
void require_form(const Format& format, const std::string& name, at::IntArrayRef sizes);

// Sizes in an object, none of them negative.
std::vector<int64_t> sizes_in(const nlohmann::json& list, const std::string& where);

}  // namespace roundpipe::quantise
