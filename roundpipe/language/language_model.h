#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include <roundpipe/api/grad_scaler.h>
#include <roundpipe/api/model.h>
#include <roundpipe/language/options.h>

namespace roundpipe {

struct LanguageModelOptions {
  // Of the weights, into which those of other dtypes are cast: fp32, bf16 or fp16. Unset: the dtype of config.json, or
  // else that of the embedding.
  std::optional<c10::ScalarType> dtype = std::nullopt;
  // How the layers compute.
  language::LayerOptions layers = {};
  // Train LoRA adapters on a frozen model. They begin as PEFT's do, drawn from torch's default generator: what they add
  // is 0.
  std::optional<LoraOptions> lora = std::nullopt;
  // The folder of a PEFT adapter to go on from; its adapter_config.json says what `lora` says otherwise.
  std::string adapter = {};
  // Encode weights as they are read, which needs adapters. The model's parameters are then their parts.
  std::optional<QuantiseOptions> quantise = std::nullopt;
  ModelOptions model = {.name = "language model"};
  // Called with the bytes that were read since the last call; may throw.
  std::function<void(int64_t)> progress = {};
};

// Rows of tokens, on the host. Undefined tensors are left out.
struct LanguageBatch {
  at::Tensor ids;  // int64 [rows, tokens]
  // int64 [rows, tokens]: the same tokens, with -100 for those that are not to be predicted. Each is predicted by what
  // is before it in its row, so the first of a row does not count.
  at::Tensor labels = {};
  at::Tensor attention_mask = {};  // [rows, tokens]: 0 for padding, else 1
  // int64 [rows or 1, tokens]. They restart with each document of a packed row, and such a row has no attention mask.
  // The label of the first token of a document is to be -100, as the document before knows nothing of it.
  at::Tensor positions = {};
  // What the sum of the losses is divided by: the labels that count in a step of several calls. 0: those of this batch.
  int64_t counted = 0;
};

struct EvaluatedLoss {
  double mean = 0;      // over the labels that count; with the loss of routers, of models that have it
  int64_t counted = 0;  // how many those are
};

// A causal language model from the folder of a transformers model, trained without Python: Llama, Mistral, Qwen2,
// Qwen3, Qwen3-MoE and GPT-OSS. Loss, logits and gradients have the bits of transformers' model over the same
// microbatches, as long as the loss is not computed in chunks. docs/cpp-language-models.md says what is supported; the
// rest is refused. Weights are read straight into the model's memory, without another copy of them. Thread safety,
// errors, and what is thrown after a move: those of Model.
class LanguageModel {
 public:
  // Throws std::invalid_argument for a folder that is no such model or is not supported, before weights are read, and
  // Error for a damaged one.
  explicit LanguageModel(const std::string& folder, const LanguageModelOptions& options = {});
  ~LanguageModel();
  LanguageModel(LanguageModel&&) noexcept;
  LanguageModel& operator=(LanguageModel&& other) noexcept;

  // The model itself: steps, plans, parameters by the names of the folder, and all else.
  Model& model();
  // Of its config.json: "llama", how many tokens there are, and how many a row may have.
  const std::string& model_type() const;
  int64_t vocabulary() const;
  int64_t max_positions() const;
  // Of the weights.
  c10::ScalarType dtype() const;

  // The loss is the mean over the labels that count in the whole batch, whatever the microbatches. The loss of routers,
  // of models that have it, is that of each microbatch, weighted by its share of these labels.
  // They throw std::invalid_argument for a batch that does not fit the model, or without a label that counts.
  // With several nodes, it is the mean over the labels of all of them, and the result has this node's mean.
  // With a scaler, for weights in fp16, losses are multiplied by its scale, as is the loss of the result.
  TrainResult forward_backward(const LanguageBatch& batch, GradScaler* scaler = nullptr);
  Model::Pending submit(const LanguageBatch& batch, GradScaler* scaler = nullptr);
  MemoryPrediction predict_memory(const LanguageBatch& batch);

  // The loss of a batch without gradients and dropouts, by the newest weights: it settles an asynchronous step, as
  // synchronize() does.
  EvaluatedLoss evaluate(const LanguageBatch& batch);
  // The logits [rows, tokens, vocabulary] without gradients, by the weights that a step would read now; labels are not
  // looked at.
  at::Tensor logits(const LanguageBatch& batch);

  // Writes the model into a folder that transformers loads; see language::write_model_folder. Waits for all work, and
  // settles an asynchronous step.
  void save(const std::string& folder, const language::ModelFolderOptions& options = {});
  // The same of a model with adapters: what PEFT's merge_and_unload() makes of it, with the same bits. The model stays
  // as it is.
  void save_merged(const std::string& folder, const language::ModelFolderOptions& options = {});
  // Writes the adapters into a folder that PEFT loads, in the same way. save() throws std::invalid_argument for a model
  // with adapters, and the other two for one without.
  void save_adapter(const std::string& folder, bool replace = false);
  const std::optional<LoraOptions>& lora() const;

 private:
  Model::Pending submit_own(const char* where, const LanguageBatch& batch, GradScaler* scaler, bool refuses_nan_early);

  struct Core;
  Core& own() const;

  std::unique_ptr<Core> core_;  // null: moved from
};

}  // namespace roundpipe
