#include "options.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <sstream>
#include <stdexcept>

#include <CLI/CLI.hpp>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>

namespace roundpipe::train {

namespace {

using optim::Algorithm;

const std::map<std::string, Algorithm>& algorithms() {
  static const std::map<std::string, Algorithm> known = {
      {"adam", Algorithm::kAdam}, {"adamw", Algorithm::kAdamW},         {"sgd", Algorithm::kSGD},
      {"lion", Algorithm::kLion}, {"adafactor", Algorithm::kAdafactor}, {"rmsprop", Algorithm::kRMSprop}};
  return known;
}

std::vector<std::string> names_of(const std::map<std::string, Algorithm>& known) {
  std::vector<std::string> names;
  for (const auto& [name, algorithm] : known) names.push_back(name);
  return names;
}

// Options of some update rules only.
struct RuleOption {
  const char* name;
  std::optional<double> given;
  double optim::Hyperparameters::* member;
  std::vector<std::string> rules;
};

std::vector<RuleOption> rule_options(const Options& options) {
  using Values = optim::Hyperparameters;
  return {{"--beta1", options.beta1, &Values::beta1, {"adam", "adamw", "lion"}},
          {"--beta2", options.beta2, &Values::beta2, {"adam", "adamw", "lion"}},
          {"--eps", options.eps, &Values::eps, {"adam", "adamw", "rmsprop"}},
          {"--momentum", options.momentum, &Values::momentum, {"sgd", "rmsprop"}}};
}

std::string text_of(double number) {
  std::ostringstream text;
  text.precision(17);
  text << number;
  return text.str();
}

// CLI::Range finds NaN in every range.
std::string refuse_nan(const std::string& text) {
  return std::isnan(std::strtod(text.c_str(), nullptr)) ? text + " is not a number" : "";
}

// Says which option was given more often than it may be; CLI11 says how many values it has.
void refuse_repetition(const CLI::App& app) {
  for (const CLI::Option* const option : app.get_options()) {
    if (option->count() < 2 || option->get_items_expected_max() != 1) continue;
    throw CLI::ValidationError(concat(option->get_name(), " is given ", option->count(), " times, expected once"));
  }
}

void add_options(CLI::App& app, Options& options) {
  const auto share = [](CLI::Option* option) {
    return option->check(CLI::Range(0.0, 1.0))->check(CLI::Validator(&refuse_nan, "", ""));
  };
  const auto number = [&](const char* name, auto& value, const char* text, double least) {
    return app.add_option(name, value, text)
        ->check(CLI::Range(least, 1e15))
        ->check(CLI::Validator(&refuse_nan, "", ""))
        ->capture_default_str();
  };
  app.add_option("--model", options.model, "folder of a transformers model")->required();
  app.add_option("--tokens", options.tokens, "token file to train on (roundpipe tokenize makes them)")->required();
  app.add_option("--out", options.out, "folder of the run: checkpoints, metrics.jsonl, and the trained model")
      ->required();
  app.add_flag("--resume", options.resume, "go on from the newest checkpoint in --out, or begin if there is none");
  app.add_flag("--dry-run", options.dry_run, "print what would be done and the memory that it takes, then end");
  app.add_flag("--verify-tokens", options.verify_tokens, "read all tokens first, and compare their checksum");
  app.add_flag("--replace-model", options.replace_model, "a trained model in --out may be there, and is replaced");

  CLI::Option* const lora = app.add_flag("--lora", options.lora, "train LoRA adapters, and freeze the model");
  number("--lora-rank", options.lora_rank, "rank of an adapter", 1)->needs(lora);
  number("--lora-alpha", options.lora_alpha, "what an adapter adds is scaled by alpha / rank", 1e-9)->needs(lora);
  share(app.add_option("--lora-dropout", options.lora_dropout, "of what enters an adapter"))
      ->needs(lora)
      ->capture_default_str();
  app.add_option("--lora-targets", options.lora_targets,
                 "linear layers with adapters, such as q_proj,up_proj; or all-linear")
      ->delimiter(',')
      ->needs(lora)
      ->capture_default_str();
  app.add_flag("--lora-rslora", options.lora_rank_stabilized, "scale by alpha / sqrt(rank)")->needs(lora);
  app.add_option("--adapter", options.adapter, "folder of a PEFT adapter to go on from")->excludes(lora);
  app.add_flag("--merge", options.merge, "also write the model with the adapters merged into its weights");

  app.add_option("--rows", options.rows, "how documents become rows: packed, stream or padded")
      ->check(CLI::IsMember({"packed", "stream", "padded"}))
      ->capture_default_str();
  number("--length", options.length, "tokens of a row", 2);
  number("--batch-tokens", options.batch_tokens, "tokens of a step; default: one row", 0);
  app.add_flag("--in-order", options.in_order, "use rows in the order of the file, not shuffled");
  CLI::Option* const epochs = number("--epochs", options.epochs, "how often all rows are used", 1e-9);
  number("--steps", options.steps, "how many steps are made, instead of --epochs", 0)->excludes(epochs);
  number("--evaluation-tokens", options.evaluation_tokens, "tokens in documents that are held out", 0);
  app.add_option("--evaluation-file", options.evaluation_file, "token file to evaluate on, instead");
  number("--evaluate-every", options.evaluate_every, "steps between evaluations; default: at the end only", 0);
  app.add_option("--seed", options.seed, "of the order of the rows")->capture_default_str();

  app.add_option("--optimizer", options.optimizer, "update rule")
      ->check(CLI::IsMember(names_of(algorithms())))
      ->capture_default_str();
  app.add_option("--moments", options.moments, "fp32, or 8bit (adam and adamw)")
      ->check(CLI::IsMember({"fp32", "8bit"}))
      ->capture_default_str();
  number("--learning-rate", options.learning_rate, "highest learning rate", 0);
  number("--weight-decay", options.weight_decay, "of all but norms and biases", 0);
  share(app.add_option("--beta1", options.beta1, "of adam, adamw and lion"));
  share(app.add_option("--beta2", options.beta2, "of adam, adamw and lion"));
  app.add_option("--eps", options.eps, "of adam, adamw and rmsprop")
      ->check(CLI::PositiveNumber)
      ->check(CLI::Validator(&refuse_nan, "", ""));
  share(app.add_option("--momentum", options.momentum, "of sgd and rmsprop"));
  number("--clip", options.clip, "largest norm of the gradients; 0: as they are", 0);
  app.add_option("--schedule", options.schedule, "of the learning rate: constant, linear or cosine")
      ->check(CLI::IsMember({"constant", "linear", "cosine"}))
      ->capture_default_str();
  number("--warmup-steps", options.warmup_steps, "steps in which the learning rate rises", 0);
  share(app.add_option("--floor", options.floor, "where a schedule ends, as a part of the learning rate"))
      ->capture_default_str();
  app.add_flag("--asynchronous", options.asynchronous, "update weights beside the next step, which reads older ones");

  app.add_option("--dtype", options.dtype, "of the weights: float32, bfloat16 or float16; default: the model's own")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}));
  app.add_option("--arithmetic", options.arithmetic,
                 "exact: with torch's bits; fast: with fused kernels, and other last bits")
      ->check(CLI::IsMember({"exact", "fast"}))
      ->capture_default_str();
  app.add_option("--attention", options.attention,
                 "packed, sdpa or eager; default: packed, for padded rows sdpa (GPT-OSS: eager)")
      ->check(CLI::IsMember({"packed", "sdpa", "eager"}));
  app.add_option("--devices", options.devices, "such as cuda:0,cuda:1 or virtual:2,memory=2GiB; default: all cards");
  app.add_option("--host-memory", options.host_memory, "refuse to train if more is predicted, such as 200GB");
  number("--microbatches", options.microbatches, "parts of a step; default: one more than devices", 0);
  app.add_flag("--recompute-by-layer", options.recompute_by_layer, "keep less for the backward");
  app.add_flag("--fault-tolerant", options.fault_tolerant, "go on when a device fails");

  number("--save-every", options.save_every, "steps between checkpoints; default: only when stopped", 0);
  number("--keep", options.keep, "how many checkpoints stay", 1);
  number("--log-every", options.log_every, "steps between lines", 1);
}

// What no single option shows.
void check_together(Options& options) {
  const auto refuse = [](const std::string& text) { throw CLI::ValidationError(text); };
  if (options.batch_tokens != 0 && options.batch_tokens % options.length != 0) {
    refuse(concat("--batch-tokens is ", options.batch_tokens, ", expected a multiple of --length, ", options.length));
  }
  if (options.moments == "8bit" && options.optimizer != "adam" && options.optimizer != "adamw") {
    refuse(concat("--moments is 8bit, expected fp32 for ", options.optimizer));
  }
  for (const RuleOption& option : rule_options(options)) {
    if (option.given && std::ranges::find(option.rules, options.optimizer) == option.rules.end()) {
      refuse(concat(option.name, " is given, and ", options.optimizer, " has no such option"));
    }
  }
  if (options.evaluate_every > 0 && options.evaluation_tokens == 0 && options.evaluation_file.empty()) {
    refuse("--evaluate-every is given, expected --evaluation-tokens or --evaluation-file beside it");
  }
  if (options.evaluation_tokens > 0 && !options.evaluation_file.empty()) {
    refuse("--evaluation-tokens and --evaluation-file are given, expected one of them");
  }
  if (!options.host_memory.empty()) {
    try {
      options.host_memory_bytes = parse_bytes(options.host_memory, "--host-memory");
    } catch (const std::invalid_argument& error) {
      refuse(error.what());
    }
    if (options.host_memory_bytes == 0) refuse("--host-memory is 0, expected more, or no such option for no limit");
  }
  if (options.merge && !trains_adapters(options)) refuse("--merge is given, expected --lora or --adapter beside it");
  if (options.learning_rate == 0) refuse("--learning-rate is 0, expected a positive number");
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

UpdateRule update_rule(const Options& options) {
  UpdateRule rule(algorithms().at(options.optimizer));
  rule.options.lr = options.learning_rate;
  rule.options.weight_decay = options.weight_decay;
  for (const RuleOption& option : rule_options(options)) {
    if (option.given) rule.options.*option.member = *option.given;
  }
  return rule;
}

optim::MomentFormat moment_format(const Options& options) {
  return options.moments == "8bit" ? optim::MomentFormat::kBlockwise8Bit : optim::MomentFormat::kFloat32;
}

LearningRate learning_rate(const Options& options, int64_t steps) {
  if (options.schedule == "linear") return linear_rate(options.warmup_steps, steps, options.floor);
  if (options.schedule == "cosine") return cosine_rate(options.warmup_steps, steps, options.floor);
  return warmup_rate(options.warmup_steps);
}

std::optional<LoraOptions> lora_of(const Options& options) {
  if (!options.lora) return std::nullopt;
  return LoraOptions{options.lora_rank, options.lora_alpha, options.lora_dropout, options.lora_rank_stabilized,
                     options.lora_targets};
}

std::optional<models::Attention> attention_option(const Options& options) {
  if (!options.attention.empty()) return models::parse_attention(options.attention);
  if (options.rows == "padded") return std::nullopt;
  return models::Attention::kPacked;
}

std::vector<std::pair<std::string, std::string>> fixed_options(const Options& options, int64_t steps,
                                                               models::Attention attention) {
  std::vector<std::pair<std::string, std::string>> fixed = {
      {"--length", std::to_string(options.length)},
      {"--batch-tokens", std::to_string(options.batch_tokens)},
      {"--rows", options.rows},
      {"--in-order", options.in_order ? "true" : "false"},
      {"--evaluation-tokens", std::to_string(options.evaluation_tokens)},
      {"--seed", std::to_string(options.seed)},
      {"--optimizer", options.optimizer},
      {"--moments", options.moments},
      {"--learning-rate", text_of(options.learning_rate)},
      {"--weight-decay", text_of(options.weight_decay)},
      {"--clip", text_of(options.clip)},
      {"--schedule", options.schedule},
      {"--warmup-steps", std::to_string(options.warmup_steps)},
      {"--floor", text_of(options.floor)},
      {"--asynchronous", options.asynchronous ? "true" : "false"},
      {"--attention", std::string(models::attention_name(attention))},
      {"--arithmetic", options.arithmetic},
      {"--microbatches", std::to_string(options.microbatches)}};
  for (const RuleOption& option : rule_options(options)) {
    if (option.given) fixed.emplace_back(option.name, text_of(*option.given));
  }
  if (options.lora) {
    std::string targets;
    for (const std::string& target : options.lora_targets) targets += (targets.empty() ? "" : ",") + target;
    fixed.emplace_back("--lora-targets", targets);
    fixed.emplace_back("--lora-rank", std::to_string(options.lora_rank));
    fixed.emplace_back("--lora-alpha", text_of(options.lora_alpha));
    fixed.emplace_back("--lora-dropout", text_of(options.lora_dropout));
    fixed.emplace_back("--lora-rslora", options.lora_rank_stabilized ? "true" : "false");
  }
  // An evaluation lets the next step read the newest weights.
  if (options.asynchronous && options.evaluate_every > 0)
    fixed.emplace_back("--evaluate-every", std::to_string(options.evaluate_every));
  // A constant rate does not know where the training ends.
  if (options.schedule != "constant") fixed.emplace_back("--steps", std::to_string(steps));
  return fixed;
}

}  // namespace roundpipe::train
