#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

#include <roundpipe/models/moe.h>
#include <roundpipe/ops/chunked_mlp.h>

namespace roundpipe::language {

enum class RotaryType : int { kDefault, kLinear, kDynamic, kLlama3, kYarn };

// Rotary positions, as transformers' `rope_parameters` describe them.
struct RotaryConfig {
  RotaryType type = RotaryType::kDefault;
  double theta = 0;
  double factor = 1;
  int64_t original_max_positions = 0;      // kLlama3, kYarn
  double low_freq_factor = 0;              // kLlama3
  double high_freq_factor = 0;             // kLlama3
  std::optional<double> attention_factor;  // kYarn; and the rest
  double beta_fast = 0;
  double beta_slow = 0;
  double mscale = 0;  // 0: none
  double mscale_all_dim = 0;
  bool truncate = true;
  bool halves = false;  // cosines and sines are made for half of a head, and used for both
};

// A mixture of experts in place of an MLP.
struct ExpertsConfig {
  int64_t count = 0;
  int64_t top_k = 0;  // of each token
  int64_t inner_width = 0;
  models::Shares shares = models::Shares::kSoftmaxOfAll;
  // Experts of GPT-OSS: with biases, and matrices [from, to] that are stacked in the folder as well.
  std::optional<models::ClampedGate> clamped;
};

// A causal language model, as its config.json describes it.
struct Config {
  std::string model_type;
  int64_t vocabulary = 0;
  int64_t width = 0;
  int64_t inner_width = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t key_heads = 0;
  int64_t head_dim = 0;
  int64_t max_positions = 0;
  double norm_eps = 0;
  ops::Activation activation = ops::Activation::kSilu;
  bool tied = false;                 // the head has the embedding's weight
  std::optional<int64_t> pad_token;  // its embedding gets no gradient
  bool query_bias = false;           // and of keys and values
  bool output_bias = false;          // of the attention
  bool mlp_bias = false;
  bool query_norm = false;  // and of keys
  bool sinks = false;       // of the attention
  // Norms multiply by their weight in fp32, and in a model of fp16 it is fp32.
  bool float_norms = false;
  // Of the layers that slide: a token sees itself and this many tokens less one before it.
  std::optional<int64_t> window;
  std::vector<char> slides;      // of each layer: whether it has the window
  double attention_dropout = 0;  // in training
  std::optional<ExpertsConfig> experts;
  std::vector<char> sparse;                  // of each layer: whether it has the experts
  std::optional<double> router_loss_factor;  // of the loss that balances the experts; none: it is not added
  RotaryConfig rotary;
  std::optional<c10::ScalarType> dtype;  // that the weights were saved in
  std::string quantization;              // the text of quantization_config; empty: the weights are plain
};

// Reads the text of a config.json of the model types llama, mistral, qwen2, qwen3, qwen3_moe and gpt_oss, with the
// defaults of transformers' classes. Throws std::invalid_argument, naming the field, for everything that would change
// the computation and is not supported, also for a field that is not known; Error for text that is not JSON. `where`
// begins the message.
Config parse_config(std::string_view text, const std::string& where);

// Of a folder with a config.json.
Config read_config(const std::string& folder);

// "float32", "bfloat16" or "float16"; std::invalid_argument for other names. `where` begins the message.
c10::ScalarType parse_dtype(std::string_view name, const std::string& where);
// The name of one of these.
std::string dtype_text(c10::ScalarType dtype);

}  // namespace roundpipe::language
