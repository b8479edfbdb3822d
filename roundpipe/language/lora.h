#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <roundpipe/language/config.h>

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

namespace language {

// The linear layers of decoder layer `index`, such as "self_attn.q_proj". Experts and their routers have none.
std::vector<std::string> linear_modules(const Config& config, int64_t index);

// Whether `module` of a layer, such as "self_attn.q_proj" of "model.layers.3", has an adapter.
bool has_adapter(const LoraOptions& lora, const std::string& layer, const std::string& module);

// Throws std::invalid_argument for a number that is not positive, and for a target that is no linear layer of one of
// the decoder layers, or one that PEFT would take for experts.
void check_lora(const LoraOptions& lora, const Config& config);

// Reads the text of PEFT's adapter_config.json. Throws std::invalid_argument, naming the field, for everything that
// would compute something else, and for fields that are not known. `where` begins the message.
LoraOptions parse_lora(std::string_view text, const std::string& where);
LoraOptions read_lora(const std::string& folder);

// The text of an adapter_config.json that PEFT reads. `base`: the model under it.
std::string lora_text(const LoraOptions& lora, const std::string& base);

// The name of an adapter's weight in PEFT's adapter_model.safetensors.
std::string peft_name(const std::string& parameter);

}  // namespace language
}  // namespace roundpipe
