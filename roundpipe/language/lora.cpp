#include <roundpipe/language/lora.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include <roundpipe/core/error.h>
#include <roundpipe/files/file_system.h>
#include <roundpipe/files/json_text.h>
#include <roundpipe/language/json_fields.h>

namespace roundpipe {

using nlohmann::json;
using nlohmann::ordered_json;

double LoraOptions::scaling() const {
  const auto ranks = static_cast<double>(rank);
  return rank_stabilized ? alpha / std::sqrt(ranks) : alpha / ranks;
}

namespace language {

namespace {

constexpr int64_t kMostAdapterConfigBytes = 4 << 20;
const char* const kAdapterConfig = "adapter_config.json";
const char* const kAllLinear = "all-linear";
constexpr int kAdapterIndent = 2;

// What says nothing about what the adapter computes.
const std::set<std::string>& harmless_to_adapters() {
  static const std::set<std::string> names = {
      "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core",      "peft_version",
      "peft_type",    "qalora_group_size",       "revision",       "layers_pattern",     "task_type",
      "loftq_config", "runtime_config",          "eva_config",     "ensure_weight_tying"};
  return names;
}

bool has_all(const LoraOptions& lora) { return lora.targets == std::vector<std::string>{kAllLinear}; }

bool ends_in(const std::string& name, const std::string& target) {
  return name == target || name.ends_with("." + target);
}

}  // namespace

std::vector<std::string> linear_modules(const Config& config, int64_t index) {
  std::vector<std::string> names = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"};
  if (config.sparse.at(static_cast<size_t>(index)) != 0) return names;
  for (const char* name : {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}) names.emplace_back(name);
  return names;
}

bool has_adapter(const LoraOptions& lora, const std::string& layer, const std::string& module) {
  if (has_all(lora)) return true;
  const std::string name = layer + "." + module;
  return std::ranges::any_of(lora.targets, [&](const std::string& target) { return ends_in(name, target); });
}

void check_lora(const LoraOptions& lora, const Config& config) {
  if (lora.rank < 1 || !(lora.alpha > 0)) {
    throw std::invalid_argument(
        concat("[lora] the rank is ", lora.rank, " and alpha ", lora.alpha, ", expected positive numbers"));
  }
  if (!(lora.dropout >= 0 && lora.dropout <= 1)) {
    throw std::invalid_argument(concat("[lora] the dropout is ", lora.dropout, ", expected a number from 0 to 1"));
  }
  if (lora.targets.empty()) throw std::invalid_argument("[lora] there is no target, expected at least one");
  // PEFT takes the names of these models' MLPs for their experts, also in layers without experts.
  const bool names_experts = config.experts && !config.experts->clamped;
  if (has_all(lora) && !names_experts) return;
  std::vector<std::string> ends;  // of all modules, each once
  for (const std::string& target : lora.targets) {
    bool found = false;
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      for (const std::string& module : linear_modules(config, layer)) {
        if (names_experts && module.starts_with("mlp.")) continue;
        found = found || ends_in(concat("model.layers.", layer, ".", module), target);
        const std::string end = module.substr(module.find('.') + 1);
        if (std::ranges::find(ends, end) == ends.end()) ends.push_back(end);
      }
    }
    if (found) continue;
    std::string names;
    for (const std::string& end : ends) names += (names.empty() ? "" : ", ") + end;
    throw std::invalid_argument(
        concat("[lora] the target '", target, "' is no linear layer of a decoder layer of this ", config.model_type,
               ", expected names such as ", names, config.experts ? "; experts take no adapters" : ""));
  }
}

LoraOptions parse_lora(std::string_view text, const std::string& where) {
  const std::string begin = concat("[lora] ", where);
  const json object = files::parse_json(text, where);
  JsonFields fields(object, begin);
  LoraOptions lora;
  fields.must_be("peft_type", "LORA");
  lora.rank = fields.integer("r", lora.rank);
  lora.alpha = fields.positive("lora_alpha", lora.alpha);
  lora.rank_stabilized = fields.flag("use_rslora", false);
  const json& targets = fields.at("target_modules");
  if (targets == kAllLinear) {
    lora.targets = {kAllLinear};
  } else {
    lora.targets.clear();
    if (!targets.is_array()) fields.refuse("target_modules", targets, "a list of names, or all-linear");
    for (const json& target : targets) {
      if (!target.is_string()) fields.refuse("target_modules", target, "a name");
      lora.targets.push_back(target.get<std::string>());
    }
  }
  // Other initialisations than these change the base.
  if (fields.has("init_lora_weights")) {
    const json& made = fields.at("init_lora_weights");
    if (!made.is_boolean() && made != "gaussian") fields.refuse("init_lora_weights", made, "true, false or gaussian");
  }
  for (const char* name : {"fan_in_fan_out", "lora_bias", "use_dora", "use_qalora", "use_bdlora"}) {
    fields.must_be(name, false);
  }
  fields.must_be("bias", "none");
  lora.dropout = fields.share("lora_dropout");
  for (const char* name : {"rank_pattern", "alpha_pattern", "exclude_modules", "modules_to_save", "layers_to_transform",
                           "layer_replication", "target_parameters", "trainable_token_indices"}) {
    if (fields.has(name) && !fields.at(name).empty()) {
      fields.refuse(name, fields.at(name), "nothing; train this adapter from Python");
    }
  }
  fields.refuse_others(harmless_to_adapters());
  return lora;
}

LoraOptions read_lora(const std::string& folder) {
  files::FileSystem& files = files::FileSystem::real();
  const std::string path = files::join(folder, kAdapterConfig);
  if (files.look(path).kind == files::EntryKind::kNothing) {
    throw std::invalid_argument(concat("[lora] there is no ", path, ", expected the folder of a PEFT adapter"));
  }
  return parse_lora(files.read_small(path, kMostAdapterConfigBytes), path);
}

std::string lora_text(const LoraOptions& lora, const std::string& base) {
  const ordered_json targets = has_all(lora) ? ordered_json(kAllLinear) : ordered_json(lora.targets);
  const ordered_json config = {{"base_model_name_or_path", base},
                               {"bias", "none"},
                               {"fan_in_fan_out", false},
                               {"inference_mode", true},
                               {"init_lora_weights", true},
                               {"lora_alpha", lora.alpha},
                               {"lora_dropout", lora.dropout},
                               {"peft_type", "LORA"},
                               {"r", lora.rank},
                               {"target_modules", targets},
                               {"task_type", "CAUSAL_LM"},
                               {"use_dora", false},
                               {"use_rslora", lora.rank_stabilized}};
  return config.dump(kAdapterIndent) + "\n";
}

std::string peft_name(const std::string& parameter) { return "base_model.model." + parameter; }

}  // namespace language
}  // namespace roundpipe
