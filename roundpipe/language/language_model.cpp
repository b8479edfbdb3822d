#include <roundpipe/language/language_model.h>

#include <cmath>
#include <map>
#include <set>
#include <stdexcept>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/language/config.h>
#include <roundpipe/language/encoded_weights.h>
#include <roundpipe/language/experts.h>
#include <roundpipe/language/layers.h>
#include <roundpipe/language/lora.h>
#include <roundpipe/language/model_folder.h>
#include <roundpipe/language/weight_files.h>
#include <roundpipe/training/loss_counts.h>
#include <roundpipe/training/model_core.h>

namespace roundpipe {

using at::Tensor;
using language::Tokens;
using language::WeightFiles;

namespace {

template <typename... Parts>
[[noreturn]] void refuse(const char* where, const Parts&... parts) {
  throw std::invalid_argument(concat("[", where, "] ", parts...));
}

void check_options(const LanguageModelOptions& options) {
  if (options.layers.loss_chunk_tokens < 0 || options.layers.mlp_chunk_tokens < 0) {
    refuse("language model", "a chunk has a negative number of tokens, expected a positive one, or 0 to choose");
  }
  const c10::ScalarType dtype = options.dtype.value_or(at::kFloat);
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) {
    refuse("language model", "the dtype is ", dtype, ", expected Float, BFloat16 or Half");
  }
}

void check_tensor(const char* where, const char* name, const Tensor& tensor, const Tensor& ids, bool one_row) {
  const bool fits = tensor.dim() == 2 && tensor.size(1) == ids.size(1) &&
                    (tensor.size(0) == ids.size(0) || (one_row && tensor.size(0) == 1));
  if (!fits) refuse(where, name, " have the shape ", tensor.sizes(), ", expected that of the ids, ", ids.sizes());
  if (!tensor.is_cpu()) refuse(where, name, " are on ", tensor.device(), ", expected them on the host");
}

// How many labels count, all of them behind the first token of a row.
int64_t counted_in(const Tensor& labels) {
  return labels.slice(1, 1).ne(language::kIgnoredLabel).sum().item<int64_t>();
}

void check_range(const char* where, const char* name, const Tensor& tensor, int64_t end) {
  if (tensor.scalar_type() != at::kLong) {
    refuse(where, name, " have the dtype ", tensor.scalar_type(), ", expected Long (int64); cast them");
  }
  if (tensor.numel() == 0) return;
  const auto [least, most] = at::aminmax(tensor);
  const int64_t wrong = least.item<int64_t>() < 0 ? least.item<int64_t>() : most.item<int64_t>();
  if (wrong < 0 || wrong >= end) refuse(where, name, " hold ", wrong, ", expected 0 to ", end - 1);
}

// Padding at the ends of rows only.
void check_mask(const char* where, const Tensor& mask, bool ends_only) {
  const Tensor kept = mask.ne(0);
  if (at::logical_and(mask.ne(0), mask.ne(1)).any().item<bool>()) {
    refuse(where, "the attention mask holds other numbers than 0 and 1, expected 0 for padding and 1 for tokens");
  }
  if (!ends_only || mask.size(1) < 2) return;
  const Tensor begins = kept.slice(1, 1).logical_and(kept.slice(1, 0, -1).logical_not()).sum(1) + kept.select(1, 0);
  if (begins.gt(1).any().item<bool>()) {
    refuse(where, "a row has padding between its tokens, expected it at the ends; the attention packed needs that");
  }
}

const char* const kAdapterFile = "adapter_model.safetensors";

// The loss of a microbatch is the last layer's output, times the scale if there is a scaler.
auto loss_by(GradScaler* scaler) {
  return [scaler](const Tensor& loss) { return scaler == nullptr ? loss : scaler->scale(loss); };
}

ModelOptions model_options(const LanguageModelOptions& options) {
  ModelOptions made = options.model;
  made.arithmetic = options.layers.arithmetic;
  made.run.loss_reduction = LossReduction::kSum;  // each is a part of the mean over the batch's tokens
  if (options.layers.loss_chunk_tokens == 0 && !made.run.chunk_logit_bytes) made.run.chunk_logit_bytes = 0;
  return made;
}

}  // namespace

struct LanguageModel::Core {
  Core(const std::string& from, const LanguageModelOptions& options);

  // By the names of the folder, without those that are encoded.
  NamedParameters weights(bool of_adapters);
  models::Encodings encodings() const;
  void read_weights(const WeightFiles& files, bool stacked, const std::function<void(int64_t)>& progress);
  // Whether transformers writes the experts' matrices stacked.
  bool has_stacked_folders() const { return config.experts && config.experts->clamped; }
  void begin_adapters();
  void write_folder(const std::string& to, const language::ModelFolderOptions& options,
                    const language::WrittenValue& written);
  Tokens checked(const char* where, const LanguageBatch& batch, bool with_labels);
  // `count`: tells the other nodes of the call; null: there are none, or it is only prepared.
  Microbatches<Tokens> to_train(const char* where, const LanguageBatch& batch, CallCount* count);
  // Cuts a batch as the model would.
  Microbatches<Tokens> cut(Tokens tokens);
  // The same, into so many. Finds each microbatch's documents before it leaves the host.
  Microbatches<Tokens> cut(const detail::Batch& batch, int count);
  RunOptions options_of_cut();

  std::string folder;
  language::Config config;
  std::optional<LoraOptions> lora;
  language::EncodedWeights encoded;
  c10::ScalarType dtype;
  models::Attention attention;
  std::optional<Model> model;  // made by the constructor
};

LanguageModel::Core::Core(const std::string& from, const LanguageModelOptions& options)
    : folder(from),
      config(language::read_config(folder)),
      lora(options.lora),
      attention(language::attention_of(config, options.layers)) {
  check_options(options);
  std::optional<WeightFiles> adapter;
  if (!options.adapter.empty()) {
    if (lora) refuse("language model", "lora and adapter are both given, expected one of them");
    lora = language::read_lora(options.adapter);
    adapter.emplace(options.adapter, kAdapterFile, "adapter_config.json");
  }
  if (lora) language::check_lora(*lora, config);
  if (options.quantise && !config.quantization.empty()) {
    refuse("language model", folder, " holds encoded weights, and quantise would encode them again; leave it out");
  }
  if (!lora && (options.quantise || !config.quantization.empty())) {
    refuse("language model", options.quantise ? "quantise is" : concat("the encoded weights of ", folder, " are"),
           options.quantise ? " for frozen weights" : " frozen", ", expected adapters beside it: lora or adapter");
  }
  if (options.quantise) encoded = weights_to_encode(config, *options.quantise);  // before files are read
  if (adapter) {
    std::vector<language::WeightShape> wanted = adapter_shapes(config, *lora);
    for (language::WeightShape& weight : wanted) weight.name = language::peft_name(weight.name);
    adapter->check(wanted, false);
  }
  const WeightFiles files(folder, config.quantization);
  std::vector<language::WeightShape> shapes = weight_shapes(config);
  const bool stacked = has_stacked_folders() || files.has_stacked_experts();
  if (!stacked) shapes = language::one_by_one(shapes);
  files.check(shapes, config.tied);
  dtype = options.dtype.value_or(config.dtype.value_or(files.dtype(shapes.front().name)));
  if (dtype == at::kDouble) {
    refuse("language model", "the weights of ", folder, " are F64 and config.json has no dtype, expected one there; ",
           "name the dtype to train in");
  }
  if (!options.quantise) encoded = encoded_in(files, config, stacked, dtype);
  for (auto& [name, weight] : encoded) weight.encoding.dtype = dtype;
  model.emplace(make_layers(config, dtype, options.layers, lora, encodings()), model_options(options));
  read_weights(files, stacked, options.progress);
  if (!lora) return;
  NamedParameters adapters = weights(true);
  for (auto& [name, tensor] : adapters) {
    if (adapter) name = language::peft_name(name);
  }
  if (adapter) {
    adapter->read(adapters);
  } else {
    begin_adapters();
  }
}

models::Encodings LanguageModel::Core::encodings() const {
  models::Encodings found;
  for (const auto& [name, weight] : encoded) found.emplace(name, weight.encoding);
  return found;
}

void LanguageModel::Core::read_weights(const WeightFiles& files, bool stacked,
                                       const std::function<void(int64_t)>& progress) {
  const auto read = [&](const NamedParameters& into) {
    files.read(stacked ? into : language::one_by_one(into), progress);
  };
  read(weights(false));
  if (encoded.empty()) return;
  const at::NoGradGuard no_grad;
  std::map<std::string, Tensor> parts;
  for (const auto& [name, tensor] : model->named_parameters()) parts.emplace(name, tensor);
  for (const auto& [name, weight] : encoded) {
    std::vector<Tensor> into;
    for (const std::string& suffix : weight.encoding.format->suffixes()) into.push_back(parts.at(name + suffix));
    if (!config.quantization.empty()) {
      language::read_encoded(files, name, stacked, weight, into, progress);
      continue;
    }
    const Tensor numbers = at::empty(weight.sizes, at::TensorOptions(dtype));
    read({{name, numbers}});
    std::vector<Tensor> made;
    try {
      made = weight.encoding.format->encode(numbers);
    } catch (const std::invalid_argument& error) {
      refuse("language model", name, " cannot be encoded: ", error.what());
    }
    for (size_t i = 0; i < made.size(); ++i) into[i].copy_(made[i]);
  }
}

NamedParameters LanguageModel::Core::weights(bool of_adapters) {
  NamedParameters found;
  std::set<std::string> hidden;
  for (const auto& [name, weight] : encoded) {
    for (const std::string& suffix : weight.encoding.format->suffixes()) hidden.insert(name + suffix);
  }
  for (const auto& [name, tensor] : model->named_parameters()) {
    const bool is_adapter = name.find(".lora_") != std::string::npos;
    const bool is_second = config.tied && name == "lm_head.weight";
    if (is_adapter == of_adapters && !is_second && !hidden.contains(name)) found.emplace_back(name, tensor);
  }
  return found;
}

void LanguageModel::Core::begin_adapters() {
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : weights(true)) {
    // As torch.nn.Linear begins.
    const double bound = 1 / std::sqrt(static_cast<double>(tensor.size(1)));
    if (name.ends_with("lora_A.weight")) {
      tensor.uniform_(-bound, bound);
    } else {
      tensor.zero_();
    }
  }
}

Tokens LanguageModel::Core::checked(const char* where, const LanguageBatch& batch, bool with_labels) {
  const Tensor& ids = batch.ids;
  if (!ids.defined() || ids.dim() != 2 || ids.numel() == 0) {
    refuse(where, "the ids are no [rows, tokens], expected at least a token");
  }
  check_tensor(where, "the ids", ids, ids, false);
  check_range(where, "the ids", ids, config.vocabulary);
  if (ids.size(1) > config.max_positions && !batch.positions.defined()) {
    refuse(where, "the rows have ", ids.size(1), " tokens, expected at most ", config.max_positions,
           ", the max_position_embeddings of the model");
  }
  Tokens tokens;
  tokens.ids = ids;
  if (batch.positions.defined()) {
    check_tensor(where, "the positions", batch.positions, ids, true);
    check_range(where, "the positions", batch.positions, config.max_positions);
    tokens.positions = batch.positions;
  }
  if (batch.attention_mask.defined()) {
    check_tensor(where, "the attention mask's numbers", batch.attention_mask, ids, false);
    check_mask(where, batch.attention_mask, attention == models::Attention::kPacked);
    tokens.attention_mask = batch.attention_mask;
  }
  if (!with_labels) return tokens;
  if (!batch.labels.defined()) refuse(where, "there are no labels, expected them beside the ids");
  check_tensor(where, "the labels", batch.labels, ids, false);
  const Tensor counts = batch.labels.ne(language::kIgnoredLabel);
  check_range(where, "the labels", batch.labels.where(counts, 0), config.vocabulary);
  tokens.labels = batch.labels;
  tokens.chunk_logit_bytes = model->run_options().chunk_logit_bytes.value_or(0);
  tokens.counted = batch.counted != 0 ? batch.counted : counted_in(batch.labels);
  if (tokens.counted <= 0) refuse(where, "no label counts, expected at least one behind the first token of a row");
  return tokens;
}

Microbatches<Tokens> LanguageModel::Core::to_train(const char* where, const LanguageBatch& batch, CallCount* count) {
  Tokens tokens = checked(where, batch, true);
  if (count != nullptr) {
    const bool is_given = batch.counted != 0;
    const auto items = is_given ? std::optional(static_cast<double>(batch.counted)) : std::nullopt;
    tokens.counted = static_cast<int64_t>(count->total(is_given ? counted_in(batch.labels) : tokens.counted, items));
  }
  tokens.training = true;
  const detail::Batch whole = detail::batch_of(std::move(tokens), /*is_call=*/false);
  const RunOptions options = model->run_options();
  return cut(whole, model->count_to_train(whole, options, [&](int parts) {
    return model->arguments(where, detail::batch_of(cut(whole, parts), true), detail::batch_of(std::tuple<>(), false),
                            loss_function<std::tuple<>>(loss_by(nullptr)), options);
  }));
}

Microbatches<Tokens> LanguageModel::Core::cut(Tokens tokens) {
  const detail::Batch whole = detail::batch_of(std::move(tokens), /*is_call=*/false);
  return cut(whole, model->count_of(whole, model->run_options()));
}

Microbatches<Tokens> LanguageModel::Core::cut(const detail::Batch& batch, int count) {
  Microbatches<Tokens> microbatches;
  for (const runtime::Values& part : detail::cut_inputs(batch, count, model->run_options().cut_inputs)) {
    Tokens& made = microbatches.values.emplace_back(join<Tokens>(part));
    made.documents = std::make_shared<ops::Documents>(
        ops::find_documents(made.attention_mask, made.positions, made.ids.size(0), made.ids.size(1), made.labels));
  }
  return microbatches;
}

RunOptions LanguageModel::Core::options_of_cut() {
  RunOptions options = model->run_options();
  options.microbatches.reset();  // as many as there are
  return options;
}

void LanguageModel::Core::write_folder(const std::string& to, const language::ModelFolderOptions& options,
                                       const language::WrittenValue& written) {
  const NamedParameters all = weights(false);
  language::write_model_folder(to, folder, has_stacked_folders() ? all : language::one_by_one(all), options, written);
}

LanguageModel::LanguageModel(const std::string& folder, const LanguageModelOptions& options)
    : core_(std::make_unique<Core>(folder, options)) {}

LanguageModel::~LanguageModel() = default;
LanguageModel::LanguageModel(LanguageModel&&) noexcept = default;
LanguageModel& LanguageModel::operator=(LanguageModel&& other) noexcept { return move_into(*this, std::move(other)); }

LanguageModel::Core& LanguageModel::own() const {
  require_not_moved_from(core_ != nullptr, "language model");
  return *core_;
}

Model& LanguageModel::model() { return *own().model; }

const std::string& LanguageModel::model_type() const { return own().config.model_type; }

int64_t LanguageModel::vocabulary() const { return own().config.vocabulary; }

int64_t LanguageModel::max_positions() const { return own().config.max_positions; }

c10::ScalarType LanguageModel::dtype() const { return own().dtype; }

const std::optional<LoraOptions>& LanguageModel::lora() const { return own().lora; }

TrainResult LanguageModel::forward_backward(const LanguageBatch& batch, GradScaler* scaler) {
  return submit_own("forward_backward", batch, scaler, /*refuses_nan_early=*/false).finish();
}

Model::Pending LanguageModel::submit(const LanguageBatch& batch, GradScaler* scaler) {
  return submit_own("submit", batch, scaler, /*refuses_nan_early=*/true);
}

Model::Pending LanguageModel::submit_own(const char* where, const LanguageBatch& batch, GradScaler* scaler,
                                         bool refuses_nan_early) {
  const std::shared_ptr<LossCounts> counts = model().loss_counts();
  const auto count = counts ? std::make_shared<CallCount>(counts) : nullptr;
  return noting_failure(count.get(), [&] {
    return model().submit_cut(where, detail::batch_of(own().to_train(where, batch, count.get()), true),
                              detail::batch_of(std::tuple<>(), false),
                              loss_function<detail::Part<std::tuple<>>>(loss_by(scaler)), own().options_of_cut(),
                              /*keep_outputs=*/false, refuses_nan_early, count);
  });
}

MemoryPrediction LanguageModel::predict_memory(const LanguageBatch& batch) {
  return model().predict_memory(own().to_train("predict_memory", batch, nullptr), std::tuple<>(), loss_by(nullptr),
                                own().options_of_cut());
}

EvaluatedLoss LanguageModel::evaluate(const LanguageBatch& batch) {
  const at::NoGradGuard no_grad;
  const Tokens tokens = own().checked("evaluate", batch, true);
  model().synchronize();
  EvaluatedLoss loss{.counted = tokens.counted};
  for (const Tensor& part : model().forward_microbatches(own().options_of_cut(), own().cut(tokens))) {
    loss.mean += part.item<double>();
  }
  return loss;
}

Tensor LanguageModel::logits(const LanguageBatch& batch) {
  const at::NoGradGuard no_grad;
  return model().forward_with(own().options_of_cut(), own().cut(own().checked("logits", batch, false)));
}

void LanguageModel::save(const std::string& folder, const language::ModelFolderOptions& options) {
  if (lora()) refuse("language model", "the model has adapters, expected none; call save_adapter or save_merged");
  model().synchronize();
  own().write_folder(folder, options, {});
}

void LanguageModel::save_merged(const std::string& folder, const language::ModelFolderOptions& options) {
  if (!lora()) refuse("language model", "the model has no adapters, expected them; call save");
  if (!own().encoded.empty()) {
    refuse("language model", "the model's weights are encoded, expected plain ones to merge into; call save_adapter, ",
           "load the adapter on the plain base, and call save_merged of that");
  }
  model().synchronize();
  std::map<std::string, Tensor> adapters;
  for (auto& [name, tensor] : own().weights(true)) adapters.emplace(name, tensor);
  own().write_folder(folder, options, [&](const std::string& name, const Tensor& weight) {
    const std::string module = name.substr(0, name.find_last_of('.'));
    const auto down = adapters.find(module + ".lora_A.weight");
    if (down == adapters.end() || !name.ends_with(".weight")) return weight;
    const Tensor& up = adapters.at(module + ".lora_B.weight");
    const at::NoGradGuard no_grad;
    return weight.clone().add_(at::matmul(up, down->second) * own().lora->scaling());
  });
}

void LanguageModel::save_adapter(const std::string& folder, bool replace) {
  if (!lora()) refuse("language model", "the model has no adapters, expected them; call save");
  model().synchronize();
  NamedParameters adapters = own().weights(true);
  for (auto& [name, tensor] : adapters) name = language::peft_name(name);
  language::write_whole_folder(folder, replace, [&](const std::string& hidden) {
    language::write_weights(hidden, kAdapterFile, adapters);
    language::write_text(hidden, "adapter_config.json", language::lora_text(*own().lora, own().folder));
  });
}

}  // namespace roundpipe
