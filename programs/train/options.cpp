#include "options.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <stdexcept>
#include <type_traits>

#include <CLI/CLI.hpp>

#include <roundpipe/command/training_options.h>
#include <roundpipe/core/arithmetic.h>
#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>

namespace roundpipe::train {

namespace {

// The text of a value in a checkpoint.
std::string text_of(const OptionValue& value) {
  const auto* const number = std::get_if<double>(&value);
  if (number == nullptr) return option_text(value);
  std::ostringstream text;
  text.precision(17);
  text << *number;
  return text.str();
}

// Calls visit(name, member) for every option of the table of training options that this program has.
template <typename Of, typename Visit>
void for_each_option(Of& options, const Visit& visit) {
  visit("model", options.model);
  visit("out", options.out);
  visit("seed", options.seed);
  visit("dtype", options.dtype);
  visit("arithmetic", options.arithmetic);
  visit("lora", options.lora);
  visit("lora_rank", options.lora_rank);
  visit("lora_alpha", options.lora_alpha);
  visit("lora_targets", options.lora_targets);
  visit("lora_dropout", options.lora_dropout);
  visit("lora_rslora", options.lora_rslora);
  visit("adapter", options.adapter);
  visit("quantise", options.quantise);
  visit("quantise_keep", options.quantise_keep);
  visit("rows", options.rows);
  visit("length", options.length);
  visit("batch_tokens", options.batch_tokens);
  visit("in_order", options.in_order);
  visit("epochs", options.epochs);
  visit("steps", options.steps);
  visit("optimizer", options.optimizer);
  visit("moments", options.moments);
  visit("masters", options.masters);
  visit("learning_rate", options.learning_rate);
  visit("weight_decay", options.weight_decay);
  visit("beta1", options.beta1);
  visit("beta2", options.beta2);
  visit("eps", options.eps);
  visit("momentum", options.momentum);
  visit("clip", options.clip);
  visit("schedule", options.schedule);
  visit("warmup_steps", options.warmup_steps);
  visit("floor", options.floor);
  visit("asynchronous", options.asynchronous);
  visit("clip_by", options.clip_by);
  visit("gradients_at_once", options.gradients_at_once);
  visit("evaluate_every", options.evaluate_every);
  visit("log_every", options.log_every);
  visit("save_every", options.save_every);
  visit("keep", options.keep);
  visit("devices", options.devices);
  visit("device_memory", options.device_memory);
  visit("host_memory", options.host_memory);
  visit("disk", options.disk);
  visit("disk_memory", options.disk_memory);
  visit("disk_holds", options.disk_holds);
  visit("microbatches", options.microbatches);
  visit("recompute_by_layer", options.recompute_by_layer);
  visit("fault_tolerant", options.fault_tolerant);
}

template <typename Number>
OptionValue value_of(const Number& value) {
  if constexpr (std::is_integral_v<Number> && !std::is_same_v<Number, bool>)
    return static_cast<int64_t>(value);
  else
    return value;
}
template <typename Number>
OptionValue value_of(const std::optional<Number>& value) {
  return value ? value_of(*value) : OptionValue{};
}
OptionValue value_of(const std::string& value) { return value.empty() ? OptionValue{} : value; }
OptionValue value_of(const std::vector<std::string>& value) { return value.empty() ? OptionValue{} : value; }

template <typename Number>
void set_otherwise(const OptionValue& otherwise, Number& member) {
  std::visit(
      [&](const auto& value) {
        if constexpr (std::is_convertible_v<decltype(value), Number>) member = static_cast<Number>(value);
      },
      otherwise);
}

OptionValues values_of(const Options& options) {
  OptionValues values;
  for_each_option(options, [&](const char* name, const auto& member) { values[name] = value_of(member); });
  return values;
}

// Says which option was given more often than it may be; CLI11 says how many values it has.
void refuse_repetition(const CLI::App& app) {
  for (const CLI::Option* const option : app.get_options()) {
    if (option->count() < 2 || option->get_items_expected_max() != 1) continue;
    throw CLI::ValidationError(concat(option->get_name(), " is given ", option->count(), " times, expected once"));
  }
}

void add_options(CLI::App& app, Options& options) {
  for_each_option(options, [&](const std::string& name, auto& member) {
    const TrainingOption& option = training_option(name);
    set_otherwise(option.otherwise, member);
    if constexpr (std::is_same_v<decltype(member), bool&>) {
      app.add_flag(option_flag(name), member, option.help);
    } else {
      CLI::Option* const added = app.add_option(option_flag(name), member, option.help);
      if (!option.choices.empty() && !option.is_size) added->check(CLI::IsMember(option.choices));
      if (option.otherwise.index() != 0) added->capture_default_str();
      if constexpr (std::is_same_v<decltype(member), std::vector<std::string>&>) added->delimiter(',');
    }
  });
  app.get_option("--model")->required();
  app.get_option("--out")->required();
  app.add_option("--tokens", options.tokens, "Token file to train on (roundpipe tokenize makes them).")->required();
  app.add_flag("--resume", options.resume, "Go on from the newest checkpoint in --out, or begin if there is none.");
  app.add_flag("--dry-run", options.dry_run, "Print what would be done and the memory that it takes, then end.");
  app.add_flag("--verify-tokens", options.verify_tokens, "Read all tokens first, and compare their checksum.");
  app.add_flag("--replace-model", options.replace_model, "A trained model in --out may be there, and is replaced.");
  app.add_flag("--merge", options.merge, "Also write the model with the adapters merged into its weights.");
  app.add_option("--evaluation-tokens", options.evaluation_tokens, "Tokens in documents that are held out.")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--evaluation-file", options.evaluation_file, "Token file to evaluate on, instead.");
  app.add_option("--attention", options.attention,
                 "packed, sdpa or eager; default: packed, for padded rows sdpa (GPT-OSS: eager).")
      ->check(CLI::IsMember({"packed", "sdpa", "eager"}));
}

// What no single option shows.
void check_together(Options& options) {
  const auto refuse = [](const std::string& text) { throw CLI::ValidationError(text); };
  try {
    check_training_options(values_of(options));
  } catch (const std::invalid_argument& error) {
    refuse(error.what());
  }
  if (options.evaluate_every && options.evaluation_tokens == 0 && options.evaluation_file.empty()) {
    refuse("--evaluate-every is given, expected --evaluation-tokens or --evaluation-file beside it");
  }
  if (options.evaluation_tokens > 0 && !options.evaluation_file.empty()) {
    refuse("--evaluation-tokens and --evaluation-file are given, expected one of them");
  }
  if (options.merge && !trains_adapters(options)) refuse("--merge is given, expected --lora or --adapter beside it");
  if (options.merge && !options.quantise.empty()) {
    refuse(
        "--merge and --quantise are given, expected one of them, since adapters merge into plain weights; "
        "roundpipe export merges the adapter into the model that it is from");
  }
}

}  // namespace

std::optional<int> read_options(int argc, const char* const* argv, Options& options) {
  CLI::App app("Trains a language model from tokens, on devices that it need not fit.", "roundpipe-train");
  add_options(app, options);
  app.set_version_flag("--version", ROUNDPIPE_VERSION);
  const auto parse = [&] {
    try {
      app.parse(argc, argv);
    } catch (const CLI::ArgumentMismatch&) {
      refuse_repetition(app);
      throw;
    }
  };
  try {
    parse();
    check_together(options);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kMistakeStatus;
  }
  return std::nullopt;
}

bool trains_adapters(const Options& options) { return roundpipe::trains_adapters(values_of(options)); }

std::string note_of_few_steps(const Options& options, int64_t steps) {
  return roundpipe::note_of_few_steps(values_of(options), steps);
}

int64_t tokens_of_step(const Options& options) { return roundpipe::tokens_of_step(values_of(options)); }

UpdateRule update_rule(const Options& options) { return roundpipe::update_rule(values_of(options)); }

std::vector<ParameterGroup> parameter_groups(const Options& options) {
  return roundpipe::parameter_groups(values_of(options));
}

optim::MomentFormat moment_format(const Options& options) {
  return options.moments == "8bit" ? optim::MomentFormat::kBlockwise8Bit : optim::MomentFormat::kFloat32;
}

optim::MasterFormat master_format(const Options& options) {
  return options.masters == "24bit" ? optim::MasterFormat::k24Bit : optim::MasterFormat::kFloat32;
}

LearningRate learning_rate(const Options& options, int64_t steps) {
  return roundpipe::learning_rate(values_of(options), steps);
}

std::optional<LoraOptions> lora_of(const Options& options) {
  if (!options.lora) return std::nullopt;
  const std::vector<std::string> all = {"all-linear"};
  return LoraOptions{options.lora_rank, options.lora_alpha, options.lora_dropout, options.lora_rslora,
                     options.lora_targets.empty() ? all : options.lora_targets};
}

std::optional<QuantiseOptions> quantise_of(const Options& options) {
  if (options.quantise.empty()) return std::nullopt;
  return QuantiseOptions{options.quantise, options.quantise_keep};
}

std::optional<models::Attention> attention_option(const Options& options) {
  if (!options.attention.empty()) return models::parse_attention(options.attention);
  if (options.rows == "padded") return std::nullopt;
  return models::Attention::kPacked;
}

FixedOptions fixed_options(const Options& options, int64_t steps, models::Attention attention) {
  OptionValues values = values_of(options);
  values["learning_rate"] = highest_learning_rate(values);
  values["batch_tokens"] = tokens_of_step(options);
  values["evaluation_tokens"] = options.evaluation_tokens;
  FixedOptions fixed = {{"--attention", std::string(models::attention_name(attention))},
                        {"--evaluation-tokens", std::to_string(options.evaluation_tokens)}};
  for (const auto& [name, value] : fixed_training_options(values)) {
    const bool is_length = name == "steps" || name == "epochs";
    if (is_length || value.index() == 0 || (!options.lora && name.starts_with("lora_"))) continue;
    fixed[option_flag(name)] = text_of(value);
  }
  // A constant rate does not know where the training ends.
  if (options.schedule != "constant") fixed["--steps"] = std::to_string(steps);
  return fixed;
}

void update_fixed_options(FixedOptions& before, const Options& options) {
  before.try_emplace("--arithmetic", arithmetic_name(Arithmetic::kExact));
  before.try_emplace("--clip-by", "norm");
  if (before.contains("--lora")) return;
  before["--lora"] = before.contains("--lora-rank") ? "true" : "false";
  if (!options.dtype.empty()) before["--dtype"] = options.dtype;
  if (!options.adapter.empty()) before["--adapter"] = options.adapter;
  const auto drop = [&](const std::string& name, const std::string& otherwise) {
    if (before[name] != "0") return;
    before.erase(name);
    if (!otherwise.empty()) before[name] = otherwise;
  };
  drop("--microbatches", "");
  drop("--batch-tokens", before["--length"]);
}

}  // namespace roundpipe::train
