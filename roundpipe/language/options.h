#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/core/arithmetic.h>
#include <roundpipe/models/implementations.h>

namespace roundpipe {

// LoRA adapters on linear layers of the decoder layers, under PEFT's names and with its defaults.
struct LoraOptions {
  int64_t rank = 8;
  double alpha = 8;
  double dropout = 0;            // of what enters an adapter, in training
  bool rank_stabilized = false;  // PEFT's use_rslora: alpha / sqrt(rank) instead of alpha / rank
  // PEFT's target_modules: names of modules, or the ends of such names: "q_proj", "mlp.up_proj"; "all-linear" alone:
  // all.
  std::vector<std::string> targets = {"q_proj", "v_proj"};

  // The factor of what an adapter adds.
  double scaling() const;
};

// Frozen weights in fewer bits: those of the linear layers and experts of the decoder layers, and neither embeddings
// nor the head. Adapters train on them.
struct QuantiseOptions {
  std::string format;                  // "nf4", "nf4-double", "mxfp4" or "int8", see quantise::find_format
  std::vector<std::string> keep = {};  // modules whose weights stay as they are, see quantise::is_name_of
};

namespace language {

// How the layers compute.
struct LayerOptions {
  // Unset: as transformers by default, see attention_of().
  std::optional<models::Attention> attention = std::nullopt;
  models::Experts experts = models::Experts::kGrouped;  // of mixtures; as transformers by default
  Arithmetic arithmetic = kDefaultArithmetic;
  // Tokens whose logits exist at a time; 0: all, or if these take more than 16 MiB, as many as
  // ops::linear_cross_entropy chooses.
  int64_t loss_chunk_tokens = 0;
  // Tokens of a row that an MLP computes at a time; 0: all of a row, or half of 16,384 if it is longer.
  int64_t mlp_chunk_tokens = 0;
};

// How a model's folder is written.
struct ModelFolderOptions {
  int64_t most_file_bytes = 5'000'000'000;  // of a file of weights, unless a single weight is larger
  bool replace = false;                     // a folder that is there gives way in one step
};

}  // namespace language
}  // namespace roundpipe
