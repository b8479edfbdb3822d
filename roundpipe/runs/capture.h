#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <roundpipe/api/model.h>
#include <roundpipe/saving/contents.h>

namespace roundpipe {

// The names of formats of moments in checkpoints.
const char* moments_name(optim::MomentFormat moments);

// A frozen parameter that the checkpoint leaves out, since it is of another folder.
using LeavesOut = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

// What a checkpoint of a model holds, by the names of its state dict. A tied parameter counts once, under its first
// name.
struct ModelNames {
  NamedParameters parameters;
  NamedParameters buffers;
  std::vector<std::pair<std::string, std::string>> tied;  // another name, and the first one
  std::set<std::string> outside;                          // see LeavesOut; parameters in mapped files are so, too
  std::map<std::string, std::string> in_file = {};        // names in weight files that differ from the model's

  ModelNames(const HostWeights& model, const LeavesOut& leaves_out);
  ModelNames(NamedParameters of_parameters, NamedParameters of_buffers, std::set<std::string> left_out,
             std::map<std::string, std::string> names_in_file);
  // The name of a parameter; null for any other tensor.
  const std::string* find(const at::Tensor& parameter) const;
  // Of a parameter or buffer, in the weight files.
  const std::string& file_name(const std::string& name) const;

 private:
  void note_parameters();

  std::unordered_map<const c10::TensorImpl*, size_t> numbers_;  // of parameters
};

// A shape as Python prints it.
std::string tuple_text(at::IntArrayRef sizes);

// Bytes of logits in a chunk of the model's loss, if it chooses its chunks itself.
std::optional<int64_t> chunk_logit_bytes(Model& model);

// A checksum of a tensor's shape, dtype, and its first, middle and last bytes.
std::string sampled_checksum(const at::Tensor& tensor);

// The state of a training at one moment, some of it still in motion. Made on the caller's thread.
class Capture {
 public:
  Capture(Model& model, int64_t step, const LeavesOut& leaves_out);

  // Takes the state of the optimizer and what it trains. A fused optimizer's steps are not waited for; with libtorch's,
  // nothing may run. Without one, weights and gradients are taken as they are.
  void take(Optimizer& optimizer, const std::shared_ptr<saving::SnapshotMemory>& memory);
  void take(torch::optim::Optimizer& optimizer);
  void take_weights();
  void take_scaler(const GradScaler& scaler);
  void take_values(const std::vector<std::pair<std::string, StateValue>>& values);

  // Waits for what is in motion, and completes the rest. Not on the caller's thread. Throws the error of a step or a
  // call: there is no state to save then.
  void finish();

  // Complete after finish().
  const std::shared_ptr<Contents>& contents() const { return contents_; }

 private:
  void take_shown_gradients();
  nlohmann::ordered_json groups_of(const std::vector<std::vector<std::string>>& names,
                                   const std::vector<StateValue>& options);

  ModelNames names_;
  const std::shared_ptr<Contents> contents_ = std::make_shared<Contents>();
  nlohmann::ordered_json state_;
  std::function<GradScaler::State()> scaler_;
  GradScalerOptions scaler_options_;
};

// The states of torch's default generators, and setting them. The check throws Error unless they are such.
StateValue random_states();
void check_random_states(const StateValue& states);
void restore_random_states(const StateValue& states);

}  // namespace roundpipe
