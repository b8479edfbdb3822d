#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <roundpipe/api/model.h>
#include <roundpipe/runs/state_encoding.h>
#include <roundpipe/saving/snapshot.h>

namespace roundpipe {

// Kinds of files in a checkpoint.
inline constexpr const char* kWeights = "model";
inline constexpr const char* kBuffers = "buffers";  // of a model with adapters, from Python
inline constexpr const char* kPrevious = "previous";
inline constexpr const char* kOptimizer = "optimizer";
inline constexpr const char* kGradients = "gradients";
inline constexpr const char* kStateFile = "state.json";
inline constexpr const char* kStateTensors = "state.safetensors";
// Names of the part of an fp32 master that a bf16 weight lacks, and of the master of an fp16 weight.
inline constexpr const char* kMasterRemainder = "master_remainder";
inline constexpr const char* kMaster = "master";

// The names of formats of moments in checkpoints.
const char* moments_name(optim::MomentFormat moments);
inline constexpr const char* kMomentsOfTorch = "torch";

// A frozen parameter that the checkpoint leaves out, since it is of another folder.
using LeavesOut = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

// What a checkpoint of a model holds, by the names of its state dict. A tied parameter counts once, under its first
// name.
struct ModelNames {
  NamedParameters parameters;
  NamedParameters buffers;
  std::vector<std::pair<std::string, std::string>> tied;  // another name, and the first one
  std::set<std::string> outside;                          // see LeavesOut; parameters in mapped files are so, too

  ModelNames(const HostWeights& model, const LeavesOut& leaves_out);
  // The name of a parameter; null for any other tensor.
  const std::string* find(const at::Tensor& parameter) const;
};

// Bytes of logits in a chunk of the model's loss, if it chooses its chunks itself.
std::optional<int64_t> chunk_logit_bytes(Model& model);

// A checksum of a tensor's shape, dtype, and its first, middle and last bytes.
std::string sampled_checksum(const at::Tensor& tensor);

// A tensor to write: its name in the file; its shape, dtype and, unless a snapshot's piece has them, its values.
struct CapturedTensor {
  std::string name;
  at::Tensor tensor;
  std::optional<size_t> piece;
};

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

  // The bytes of the tensors in use that are to be written as they are now.
  int64_t plain_bytes() const;
  // Replaces these tensors by copies.
  void copy_plain();
  // Waits for what is in motion, and completes the rest. Not on the caller's thread. Throws the error of a step or a
  // call: there is no state to save then.
  void finish();

  using Section = std::pair<std::string, std::vector<CapturedTensor>>;
  const std::vector<Section>& sections() const { return sections_; }
  const nlohmann::ordered_json& state() const { return state_; }
  std::vector<std::pair<std::string, at::Tensor>>& values() { return encoder_.tensors(); }
  saving::Snapshot* snapshot() const { return snapshot_.get(); }

 private:
  void add(const char* section, CapturedTensor tensor);
  void add_piece(size_t number, const saving::Snapshot::Piece& piece);
  void take_shown_gradients();
  nlohmann::ordered_json groups_of(const std::vector<std::vector<std::string>>& names,
                                   const std::vector<StateValue>& options);

  ModelNames names_;
  std::vector<Section> sections_;
  nlohmann::ordered_json state_;
  StateEncoder encoder_;
  std::shared_ptr<saving::Snapshot> snapshot_;
  std::function<GradScaler::State()> scaler_;
  GradScalerOptions scaler_options_;
  // By block, counted as ModelOptimizer does, and parameter.
  std::vector<std::vector<std::string>> places_;
  std::vector<std::vector<std::vector<std::string>>> moment_names_;
};

// The states of torch's default generators, and setting them. The check throws Error unless they are such.
StateValue random_states();
void check_random_states(const StateValue& states);
void restore_random_states(const StateValue& states);

}  // namespace roundpipe
