#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <roundpipe/runs/state_value.h>

// Values as JSON and tensors: what a checkpoint's state.json and state.safetensors hold. docs/checkpoint-format.md
// documents the encoding, which the Python package has as well.
namespace roundpipe {

// Encodes values and gathers their tensors. Thread safety: one thread.
class StateEncoder {
 public:
  // `path` names the value in messages, and its tensors. Throws std::invalid_argument, with the path, for a tensor that
  // is not dense, text that is not UTF-8, and values nested more than 64 deep.
  nlohmann::ordered_json encode(const StateValue& value, const std::string& path, bool copies_tensors = true);

  // Tensors on the host by the names that the JSON has for them, in their order.
  std::vector<std::pair<std::string, at::Tensor>>& tensors() { return tensors_; }

 private:
  nlohmann::ordered_json encode_within(const StateValue& value, const std::string& path, int depth);
  nlohmann::ordered_json encode_items(const StateValue::List& items, const std::string& path, int depth);
  std::string keep(const at::Tensor& tensor, const std::string& path);

  bool copies_ = true;
  std::vector<std::pair<std::string, at::Tensor>> tensors_;
  std::map<std::string, int> names_;
};

// The value that was encoded. `tensor` finds a tensor by its name. Throws Error, with the path, for JSON that no
// encoder makes, and std::invalid_argument for what only Python can hold: integers of more than 64 bits, arrays of
// unusual types.
using FindTensor = std::function<at::Tensor(const std::string& name)>;
StateValue decode_state(const nlohmann::json& json, const FindTensor& tensor, const std::string& path);

}  // namespace roundpipe
