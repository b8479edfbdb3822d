#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <roundpipe/language/config.h>
#include <roundpipe/language/options.h>

namespace roundpipe::language {

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

}  // namespace roundpipe::language
