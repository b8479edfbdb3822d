#pragma once

#include <fstream>
#include <string>
#include <vector>

#include <ATen/Functions.h>

#include <roundpipe/files/safetensors.h>
#include <roundpipe/language/config.h>
#include <roundpipe/language/layers.h>

#include "../temporary_folder.h"

namespace roundpipe::support {

inline constexpr const char* kConfig = R"({
  "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 23, "hidden_size": 16,
  "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
  "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
  "tie_word_embeddings": false})";

// The folder of a small model, as transformers writes it.
struct ModelFolder : TemporaryFolder {
  ModelFolder() {
    std::ofstream(*this / "config.json") << kConfig;
    at::manual_seed(3);
    std::vector<files::TensorDescription> described;
    std::string bytes;
    for (const language::WeightShape& weight : language::weight_shapes(language::read_config(path()))) {
      described.push_back({weight.name, "F32", weight.shape});
      const at::Tensor values = at::randn(weight.shape) * 0.1;
      bytes.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
    }
    std::ofstream(*this / "model.safetensors", std::ios::binary)
        << files::lay_out_safetensors(described, {{"format", "pt"}}).header << bytes;
  }
};

}  // namespace roundpipe::support
