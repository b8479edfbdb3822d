#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <roundpipe/saving/state_value.h>

// Values as JSON and tensors: what a checkpoint's state.json and state.safetensors hold.
// docs/reference/checkpoint-format.md documents the encoding.
namespace roundpipe {

// A key of a dictionary as Python's str() prints it; paths of values have it.
std::string text_of_key(const StateValue& key);
// Throws std::invalid_argument, with the path, for a list, tuple or dictionary at such a depth, or within itself.
void require_shallow(int depth, bool contains_itself, const std::string& path);

// Encodes values and gathers their tensors. Thread safety: one thread.
class StateEncoder {
 public:
  // `path` names the value in messages, and its tensors. Throws std::invalid_argument, with the path, for a tensor that
  // is not dense, text that is not UTF-8, and lists in each other more than 64 deep.
  nlohmann::ordered_json encode(const StateValue& value, const std::string& path, bool copies_tensors = true);

  // Tensors on the host by the names that the JSON has for them, in their order.
  std::vector<std::pair<std::string, at::Tensor>>& tensors() { return tensors_; }
  const std::vector<std::pair<std::string, at::Tensor>>& tensors() const { return tensors_; }

 private:
  nlohmann::ordered_json encode_within(const StateValue& value, const std::string& path, int depth);
  nlohmann::ordered_json encode_items(const StateValue::List& items, const std::string& path, int depth);
  std::string keep(const at::Tensor& tensor, const std::string& path);

  bool copies_ = true;
  std::vector<std::pair<std::string, at::Tensor>> tensors_;
  std::map<std::string, int> names_;
};

// The names of the tensors of an encoded value, in its order.
std::vector<std::string> tensor_names(const nlohmann::json& encoded);
// Of a host tensor's shape, dtype and values.
uint64_t fingerprint_of(const at::Tensor& tensor);

// The value that was encoded. `tensor` finds a tensor by its name. Throws Error, with the path, for JSON that no
// encoder makes.
using FindTensor = std::function<at::Tensor(const std::string& name)>;
StateValue decode_state(const nlohmann::json& json, const FindTensor& tensor, const std::string& path);

}  // namespace roundpipe
