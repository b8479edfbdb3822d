#include <roundpipe/language/config.h>

#include <algorithm>
#include <set>
#include <stdexcept>

#include <roundpipe/core/error.h>
#include <roundpipe/files/file_system.h>
#include <roundpipe/files/json_text.h>
#include <roundpipe/language/json_fields.h>

namespace roundpipe::language {

using nlohmann::json;

namespace {

constexpr int64_t kMostConfigBytes = 4 << 20;

// What says nothing about the computation of a training step.
const std::set<std::string>& harmless() {
  static const std::set<std::string> names = {"_name_or_path",
                                              "architectures",
                                              "auto_map",
                                              "bos_token_id",
                                              "eos_token_id",
                                              "id2label",
                                              "initializer_range",
                                              "label2id",
                                              "name_or_path",
                                              "output_attentions",
                                              "output_hidden_states",
                                              "pretraining_tp",
                                              "problem_type",
                                              "return_dict",
                                              "task_specific_params",
                                              "tokenizer_class",
                                              "transformers_version",
                                              "use_cache"};
  return names;
}

constexpr double kDefaultTheta = 10000;
constexpr double kDefaultEps = 1e-6;

struct TypeDefaults {
  const char* model_type;
  int64_t key_heads;  // 0: as many as heads
  int64_t head_dim;   // 0: width / heads
  int64_t max_positions;
  double theta = kDefaultTheta;
  double norm_eps = kDefaultEps;
};
constexpr TypeDefaults kTypes[] = {{"llama", 0, 0, 2048},      {"mistral", 8, 0, 4096 * 32},
                                   {"qwen2", 32, 0, 32768},    {"qwen3", 32, 128, 32768},
                                   {"qwen3_moe", 4, 0, 32768}, {"gpt_oss", 8, 64, 131072, 150000, 1e-5}};
const char* const kTypesText = "llama, mistral, qwen2, qwen3, qwen3_moe and gpt_oss";

// Of a GPT-OSS model whose config.json says nothing about its positions.
const json& default_gpt_oss_rotary() {
  static const json fields = {{"rope_type", "yarn"}, {"factor", 32.0},    {"beta_fast", 32.0},
                              {"beta_slow", 1.0},    {"truncate", false}, {"original_max_position_embeddings", 4096}};
  return fields;
}

RotaryType rotary_type(JsonFields& fields, const std::string& name) {
  if (name == "default") return RotaryType::kDefault;
  if (name == "linear") return RotaryType::kLinear;
  if (name == "dynamic") return RotaryType::kDynamic;
  if (name == "llama3") return RotaryType::kLlama3;
  if (name == "yarn") return RotaryType::kYarn;
  fields.refuse("rope_type", name, "one of default, linear, dynamic, llama3 and yarn; train this model from Python");
}

RotaryConfig parse_rotary(JsonFields& config, const std::string& where, int64_t max_positions,
                          const TypeDefaults& defaults) {
  // transformers prefers the older name where both are there.
  const bool older = config.has("rope_scaling") && !config.at("rope_scaling").empty();
  const bool newer = config.has("rope_parameters");
  const bool is_gpt_oss = defaults.model_type == std::string_view("gpt_oss");
  const json none = is_gpt_oss ? default_gpt_oss_rotary() : json::object();
  const json& object = older ? config.at("rope_scaling") : newer ? config.at("rope_parameters") : none;
  JsonFields fields(object, concat(where, older ? " 'rope_scaling'" : " 'rope_parameters'"));
  RotaryConfig rotary;
  rotary.halves = is_gpt_oss;
  const double theta = config.positive("rope_theta", defaults.theta);
  rotary.theta = fields.positive("rope_theta", theta);
  const std::string type = fields.text("type", "default");
  rotary.type = rotary_type(fields, fields.text("rope_type", type));
  fields.must_be("partial_rotary_factor", 1.0);
  if (rotary.type != RotaryType::kDefault) rotary.factor = fields.positive("factor");
  if (rotary.type == RotaryType::kLlama3 || rotary.type == RotaryType::kYarn) {
    rotary.original_max_positions = fields.integer("original_max_position_embeddings", max_positions);
  }
  if (rotary.type == RotaryType::kLlama3) {
    rotary.low_freq_factor = fields.positive("low_freq_factor");
    rotary.high_freq_factor = fields.positive("high_freq_factor");
    if (rotary.high_freq_factor == rotary.low_freq_factor) {
      fields.refuse("high_freq_factor", fields.at("high_freq_factor"), "another number than low_freq_factor");
    }
  }
  if (rotary.type == RotaryType::kYarn) {
    if (fields.has("attention_factor")) rotary.attention_factor = fields.number("attention_factor");
    const auto or_default = [](double value, double otherwise) { return value == 0 ? otherwise : value; };
    rotary.beta_fast = or_default(fields.number("beta_fast", 0), 32);
    rotary.beta_slow = or_default(fields.number("beta_slow", 0), 1);
    rotary.mscale = fields.number("mscale", 0);
    rotary.mscale_all_dim = fields.number("mscale_all_dim", 0);
    rotary.truncate = fields.flag("truncate", true);
  }
  fields.refuse_others({});
  return rotary;
}

// What each layer's type says; nothing if there are no types.
void parse_layer_types(JsonFields& fields, Config& config) {
  if (!fields.has("layer_types")) return;
  const json& types = fields.at("layer_types");
  if (!types.is_array() || types.size() != config.slides.size()) {
    fields.refuse("layer_types", types, concat("a list with a type for each of ", config.layers, " layers"));
  }
  for (size_t i = 0; i < types.size(); ++i) {
    config.slides[i] = types[i] == "sliding_attention" ? 1 : 0;
    if (config.slides[i] == 0 && types[i] != "full_attention") {
      fields.refuse("layer_types", types[i], "full_attention or sliding_attention");
    }
    if (config.slides[i] != 0 && !config.window) {
      fields.refuse("layer_types", types[i], "full_attention, since no sliding_window is used");
    }
  }
}

void parse_windows(JsonFields& fields, Config& config) {
  config.slides.assign(static_cast<size_t>(config.layers), 0);
  if (config.model_type == "llama") return;
  if (config.model_type == "mistral") {
    if (fields.is_null("sliding_window")) return;
    config.window = fields.integer("sliding_window", 4096);
    config.slides.assign(static_cast<size_t>(config.layers), 1);
    return;
  }
  if (config.model_type == "gpt_oss") {
    if (fields.is_null("sliding_window")) fields.refuse("sliding_window", nullptr, "an integer of at least 1");
    config.window = fields.integer("sliding_window", 128);
    for (size_t i = 0; i < config.slides.size(); i += 2) config.slides[i] = 1;
    parse_layer_types(fields, config);
    return;
  }
  const bool slides = fields.flag("use_sliding_window", false);
  if (config.model_type == "qwen3_moe") {
    if (slides && !fields.is_null("sliding_window")) config.window = fields.integer("sliding_window", 4096);
    fields.has("sliding_window");
    fields.has("max_window_layers");  // which this class does not read
    config.slides.assign(static_cast<size_t>(config.layers), config.window ? 1 : 0);
    return;
  }
  if (slides && !fields.is_null("sliding_window")) config.window = fields.integer("sliding_window", 4096);
  fields.has("sliding_window");
  const int64_t first = fields.integer("max_window_layers", 28, 0);
  for (int64_t i = first; config.window && i < config.layers; ++i) config.slides[static_cast<size_t>(i)] = 1;
  parse_layer_types(fields, config);
}

// Of Qwen3-MoE: which layers have experts, and how wide they are.
void parse_sparse_layers(JsonFields& fields, Config& config, ExpertsConfig& experts) {
  experts.inner_width = fields.integer("moe_intermediate_size", 768);
  if (fields.flag("norm_topk_prob", false)) experts.shares = models::Shares::kNormalized;
  config.sparse.assign(static_cast<size_t>(config.layers), 0);
  const int64_t period = fields.integer("decoder_sparse_step", 1);
  for (int64_t i = period - 1; i < config.layers; i += period) config.sparse[static_cast<size_t>(i)] = 1;
  if (!fields.has("mlp_only_layers")) return;
  for (const json& index : fields.at("mlp_only_layers")) {
    if (!index.is_number_unsigned()) fields.refuse("mlp_only_layers", index, "numbers of layers");
    if (index.get<uint64_t>() < config.sparse.size()) config.sparse[index.get<size_t>()] = 0;
  }
}

void parse_experts(JsonFields& fields, Config& config) {
  const bool is_gpt_oss = config.model_type == "gpt_oss";
  config.sparse.assign(static_cast<size_t>(config.layers), is_gpt_oss ? 1 : 0);
  if (!is_gpt_oss && config.model_type != "qwen3_moe") return;
  ExpertsConfig experts;
  const int64_t count = fields.integer("num_experts", 128);
  experts.count = fields.integer("num_local_experts", count);
  if (fields.has("num_experts") && experts.count != count) {
    fields.refuse("num_experts", count, concat("as many as num_local_experts, ", experts.count));
  }
  experts.top_k = fields.integer("num_experts_per_tok", is_gpt_oss ? 4 : 8);
  if (experts.top_k > experts.count) {
    fields.refuse("num_experts_per_tok", experts.top_k, concat("at most the ", experts.count, " experts"));
  }
  if (is_gpt_oss) {
    experts.inner_width = config.inner_width;
    experts.shares = models::Shares::kSoftmaxOfChosen;
    experts.clamped = {fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)};
    // Copies of other fields in the published folders, which transformers does not read.
    fields.has("experts_per_token");
    fields.has("initial_context_length");
  } else {
    parse_sparse_layers(fields, config, experts);
  }
  const double factor = fields.number("router_aux_loss_coef", 0.001);
  if (fields.flag("output_router_logits", false)) {
    if (std::ranges::find(config.sparse, 1) == config.sparse.end()) {
      fields.refuse("output_router_logits", true, "false, since no layer has experts");
    }
    config.router_loss_factor = factor;
  }
  config.experts = experts;
}

ops::Activation parse_activation(JsonFields& fields, const std::string& model_type) {
  const std::string activation = fields.text("hidden_act", "silu");
  if (model_type == "gpt_oss") return ops::Activation::kSilu;  // its gate is another one, whatever the field says
  try {
    return ops::parse_activation(activation);
  } catch (const std::invalid_argument& error) {
    fields.refuse("hidden_act", activation, concat("an activation that is known here: ", error.what()));
  }
}

std::optional<int64_t> parse_pad_token(JsonFields& fields, int64_t vocabulary) {
  if (!fields.has("pad_token_id")) return std::nullopt;
  const json& value = fields.at("pad_token_id");
  if (!value.is_number_integer() || value.get<int64_t>() < -vocabulary || value.get<int64_t>() >= vocabulary) {
    fields.refuse("pad_token_id", value, concat("a token of the vocabulary of ", vocabulary, ", or null"));
  }
  const auto token = value.get<int64_t>();
  return token < 0 ? token + vocabulary : token;
}

}  // namespace

Config parse_config(std::string_view text, const std::string& where) {
  const std::string begin = concat("[language model] ", where);
  const json object = files::parse_json(text, where);
  JsonFields fields(object, begin);
  Config config;
  config.model_type = fields.text("model_type");
  const TypeDefaults* defaults = nullptr;
  for (const TypeDefaults& type : kTypes) {
    if (config.model_type == type.model_type) defaults = &type;
  }
  if (defaults == nullptr) {
    fields.refuse("model_type", object.at("model_type"),
                  concat("one of ", kTypesText, "; train this model from Python"));
  }
  if (fields.has("architectures")) {
    for (const json& name : fields.at("architectures")) {
      if (!name.is_string() || !name.get<std::string>().ends_with("ForCausalLM")) {
        fields.refuse("architectures", name, "a class that ends in ForCausalLM");
      }
    }
  }
  config.vocabulary = fields.integer("vocab_size");
  config.width = fields.integer("hidden_size");
  config.inner_width = fields.integer("intermediate_size");
  config.layers = fields.integer("num_hidden_layers");
  config.heads = fields.integer("num_attention_heads");
  // null means as many as heads, for each of the types.
  const bool as_heads = fields.is_null("num_key_value_heads") || defaults->key_heads == 0;
  config.key_heads = fields.integer("num_key_value_heads", as_heads ? config.heads : defaults->key_heads);
  if (config.heads % config.key_heads != 0) {
    fields.refuse("num_key_value_heads", config.key_heads, concat("a divisor of the ", config.heads, " heads"));
  }
  if (config.model_type != "qwen2" && fields.has("head_dim")) {
    config.head_dim = fields.integer("head_dim");
  } else if (defaults->head_dim != 0 && !fields.is_null("head_dim")) {
    config.head_dim = defaults->head_dim;
  } else {
    config.head_dim = config.width / config.heads;
    if (config.width % config.heads != 0) {
      fields.refuse("hidden_size", config.width, concat("a multiple of the ", config.heads, " heads"));
    }
  }
  if (config.head_dim % 2 != 0) fields.refuse("head_dim", config.head_dim, "an even number, as rotary positions need");
  config.max_positions = fields.integer("max_position_embeddings", defaults->max_positions);
  config.norm_eps = fields.number("rms_norm_eps", defaults->norm_eps);
  config.activation = parse_activation(fields, config.model_type);
  config.tied = fields.flag("tie_word_embeddings", false);
  config.pad_token = parse_pad_token(fields, config.vocabulary);
  if (config.model_type == "llama" || config.model_type.starts_with("qwen3")) {
    config.query_bias = config.output_bias = fields.flag("attention_bias", false);
  }
  if (config.model_type == "gpt_oss") {
    config.query_bias = config.output_bias = fields.flag("attention_bias", true);
    config.sinks = config.float_norms = true;
  }
  if (config.model_type == "qwen2") config.query_bias = true;
  if (config.model_type == "llama") config.mlp_bias = fields.flag("mlp_bias", false);
  config.query_norm = config.model_type.starts_with("qwen3");
  config.attention_dropout = fields.share("attention_dropout");
  parse_windows(fields, config);
  parse_experts(fields, config);
  config.rotary = parse_rotary(fields, begin, config.max_positions, *defaults);
  for (const char* name : {"torch_dtype", "dtype"}) {
    if (fields.has(name)) config.dtype = parse_dtype(fields.text(name), concat(begin, " '", name, "'"));
  }
  if (fields.has("quantization_config")) config.quantization = fields.at("quantization_config").dump();
  fields.must_be("is_causal", true);
  fields.must_be("is_decoder", false);
  fields.must_be("is_encoder_decoder", false);
  fields.must_be("add_cross_attention", false);
  fields.must_be("tie_encoder_decoder", false);
  fields.must_be("chunk_size_feed_forward", 0);
  fields.must_be("partial_rotary_factor", 1.0);
  fields.refuse_others(harmless());
  return config;
}

Config read_config(const std::string& folder) {
  files::FileSystem& files = files::FileSystem::real();
  const std::string path = files::join(folder, "config.json");
  if (files.look(path).kind == files::EntryKind::kNothing) {
    throw std::invalid_argument(concat("[language model] there is no ", path,
                                       ", expected the folder of a transformers model; name another folder"));
  }
  return parse_config(files.read_small(path, kMostConfigBytes), path);
}

c10::ScalarType parse_dtype(std::string_view name, const std::string& where) {
  if (name == "float32") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float16") return at::kHalf;
  throw std::invalid_argument(concat(where, " is '", files::shown(name), "', expected float32, bfloat16 or float16"));
}

std::string dtype_text(c10::ScalarType dtype) {
  if (dtype == at::kFloat) return "float32";
  return dtype == at::kBFloat16 ? "bfloat16" : "float16";
}

}  // namespace roundpipe::language
