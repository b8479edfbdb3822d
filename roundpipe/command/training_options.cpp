#include <roundpipe/command/training_options.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>

#include <roundpipe/core/arithmetic.h>
#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/number_text.h>
#include <roundpipe/optim/muon_parameters.h>
#include <roundpipe/optim/weight_decay.h>
#include <roundpipe/quantise/format.h>
#include <roundpipe/storage/disk_options.h>

namespace roundpipe {

namespace {

using Bits = TrainingOption::Bits;
using Texts = std::vector<std::string>;

constexpr double kFullRate = 2e-5, kAdapterRate = 2e-4;
constexpr int64_t kRowsOfAStep = 8;
constexpr double kLargestSeed = 4294967295.0;  // numpy's, too

// What only some update rules have.
struct OfSomeRules {
  const char* name;
  Texts rules;
  double optim::Hyperparameters::* member;

  bool has(const std::string& rule) const { return std::ranges::find(rules, rule) != rules.end(); }
  // Of the AdamW that steps what Muon is not for.
  bool is_beside_muon(const std::string& rule) const { return rule == "muon" && std::string_view(name) != "momentum"; }
};

const std::vector<OfSomeRules>& of_some_rules() {
  using optim::Hyperparameters;
  static const std::vector<OfSomeRules> options = {
      {"beta1", {"adam", "adamw", "lion", "muon"}, &Hyperparameters::beta1},
      {"beta2", {"adam", "adamw", "lion", "muon"}, &Hyperparameters::beta2},
      {"eps", {"adam", "adamw", "rmsprop", "muon"}, &Hyperparameters::eps},
      {"momentum", {"sgd", "rmsprop", "muon"}, &Hyperparameters::momentum}};
  return options;
}

const std::map<std::string, optim::Algorithm>& algorithms() {
  using optim::Algorithm;
  static const std::map<std::string, Algorithm> known = {
      {"adam", Algorithm::kAdam}, {"adamw", Algorithm::kAdamW},         {"sgd", Algorithm::kSGD},
      {"lion", Algorithm::kLion}, {"adafactor", Algorithm::kAdafactor}, {"rmsprop", Algorithm::kRMSprop},
      {"muon", Algorithm::kMuon}};
  return known;
}

const Texts& of_lora() {
  static const Texts names = {"lora_rank", "lora_alpha", "lora_targets", "lora_dropout", "lora_rslora"};
  return names;
}

std::vector<TrainingOption> make_options() {
  return {
      {.name = "model", .help = "Folder of a transformers model.", .bits = Bits::kNo, .of_a_machine = true},
      {.name = "out",
       .help = "Folder of the run: result, checkpoints, metrics.",
       .bits = Bits::kNo,
       .of_a_machine = true},
      {.name = "seed",
       .help = "Of new adapters, dropout, the order of rows, and what is held out.",
       .otherwise = int64_t{0},
       .least = 0,
       .most = kLargestSeed},
      {.name = "dtype",
       .help = "Of the weights (default: that of the model's files). With float16, losses are scaled.",
       .choices = {"float32", "bfloat16", "float16"}},
      {.name = "arithmetic",
       .help = "exact: with torch's bits. fast: with fused kernels, and other last bits.",
       .otherwise = std::string(arithmetic_name(kDefaultArithmetic)),
       .choices = {"exact", "fast"}},

      {.name = "lora", .help = "Train LoRA adapters, and freeze the model.", .otherwise = false},
      {.name = "dora", .help = "Train DoRA adapters: LoRA with a magnitude of each weight's rows.", .otherwise = false},
      {.name = "lora_rank", .help = "Rank of an adapter.", .otherwise = int64_t{8}, .least = 1},
      {.name = "lora_alpha",
       .help = "What an adapter adds is scaled by alpha / rank.",
       .otherwise = 8.0,
       .least = 0,
       .above = true},
      {.name = "lora_targets",
       .help = "A linear layer with an adapter, such as q_proj; again for more (default: all)."},
      {.name = "lora_dropout",
       .help = "Dropout before an adapter.",
       .otherwise = 0.0,
       .least = 0,
       .most = 1,
       .below = true},
      {.name = "lora_rslora", .help = "Scale by alpha / sqrt(rank).", .otherwise = false},
      {.name = "adapter", .help = "Folder of a PEFT adapter to go on from.", .of_a_machine = true},
      {.name = "quantise",
       .help = "Hold the frozen weights of linear layers and experts in about 4 bits (nf4, nf4-double, mxfp4) or 8.",
       .choices = quantise::format_names()},
      {.name = "quantise_keep", .help = "A module whose weights stay as they are, such as down_proj; again for more."},

      {.name = "rows",
       .help = "packed: short samples share a row, without seeing each other. stream: no gaps. padded: a row for each.",
       .otherwise = std::string("packed"),
       .choices = {"packed", "stream", "padded"}},
      {.name = "length", .help = "Tokens of a row, at most.", .otherwise = int64_t{2048}, .least = 2},
      {.name = "batch_tokens",
       .help = concat("Tokens of a step, at most (default: ", kRowsOfAStep, " rows)."),
       .least = 1},
      {.name = "in_order", .help = "Use samples in the order of the data, not shuffled.", .otherwise = false},
      {.name = "epochs", .help = "How often all samples are used.", .otherwise = int64_t{1}, .least = 0, .above = true},
      {.name = "steps", .help = "How many steps are made, instead of --epochs.", .least = 1},

      {.name = "optimizer",
       .help = "Update rule. muon: of the layers' matrices; adamw of embeddings, the head, norms and biases.",
       .otherwise = std::string("adamw"),
       .choices = {"adam", "adamw", "sgd", "lion", "adafactor", "rmsprop", "muon"}},
      {.name = "moments", .help = "Of adam and adamw.", .otherwise = std::string("fp32"), .choices = {"fp32", "8bit"}},
      {.name = "masters",
       .help = "Of bf16 weights; 24bit: one byte less a weight, rounded by chance.",
       .otherwise = std::string("fp32"),
       .choices = {"fp32", "24bit"}},
      {.name = "learning_rate",
       .help = concat("Highest learning rate (default: ", kFullRate, ", for adapters ", kAdapterRate, ")."),
       .least = 0,
       .above = true},
      {.name = "weight_decay", .help = "Of all but norms and biases.", .otherwise = 0.0, .least = 0},
      {.name = "beta1",
       .help = "Of adam, adamw, lion, and of the adamw beside muon.",
       .least = 0,
       .most = 1,
       .below = true},
      {.name = "beta2",
       .help = "Of adam, adamw, lion, and of the adamw beside muon.",
       .least = 0,
       .most = 1,
       .below = true},
      {.name = "eps", .help = "Of adam, adamw, rmsprop, and of the adamw beside muon.", .least = 0, .above = true},
      {.name = "momentum", .help = "Of sgd, rmsprop and muon.", .least = 0, .most = 1, .below = true},
      {.name = "clip", .help = "Largest norm of the gradients; 0: as they are.", .otherwise = 1.0, .least = 0},
      {.name = "clip_by",
       .help =
           "norm, or, with --gradients-at-once, last_norm: that of the step before; or two_passes: exact, by a first "
           "pass over each batch that only measures.",
       .otherwise = std::string("norm"),
       .choices = {"norm", "last_norm", kTwoPasses}},
      {.name = "gradients_at_once",
       .help = "Use each gradient as it comes, and keep room on the host for those of a few layers only.",
       .otherwise = false,
       .bits = Bits::kNo,
       .of_a_machine = true},
      {.name = "schedule",
       .help = "Of the learning rate.",
       .otherwise = std::string("cosine"),
       .choices = {"constant", "linear", "cosine"}},
      {.name = "warmup_steps", .help = "Steps in which the learning rate rises.", .otherwise = int64_t{0}, .least = 0},
      {.name = "floor",
       .help = "Where a schedule ends, as a part of the learning rate.",
       .otherwise = 0.0,
       .least = 0,
       .most = 1},
      {.name = "asynchronous",
       .help = "Update weights beside the next step, which reads those of one step ago.",
       .otherwise = false},

      // An evaluation lets the next step read the newest weights.
      {.name = "evaluate_every",
       .help = "Steps between evaluations (default: at the end).",
       .least = 1,
       .bits = Bits::kIfAsynchronous},
      {.name = "log_every",
       .help = "Steps between lines on the screen.",
       .otherwise = int64_t{1},
       .least = 1,
       .bits = Bits::kNo},
      {.name = "save_every",
       .help = "Steps between checkpoints (default: only when stopped).",
       .least = 1,
       .bits = Bits::kNo},
      {.name = "keep", .help = "How many checkpoints stay.", .otherwise = int64_t{1}, .least = 1, .bits = Bits::kNo},

      {.name = "devices",
       .help = "Such as cuda:0,cuda:1 or virtual:4,memory=2GiB (default: ROUNDPIPE_DEVICES, else all cards).",
       .bits = Bits::kNo,
       .of_a_machine = true},
      {.name = "device_memory",
       .help = "Limit of a step on each device, such as 20GB; plans keep to it. unmeasured: of its memory, unchecked.",
       .choices = {"unmeasured"},
       .is_size = true,
       .bits = Bits::kNo,
       .of_a_machine = true},
      {.name = "host_memory",
       .help = "Refuse to train if the host needs more, such as 200GB.",
       .is_size = true,
       .bits = Bits::kNo,
       .of_a_machine = true},
      {.name = "disk",
       .help = "Folder on a disk for the moments (see --disk-holds) that memory has no room for. Nothing of it stays.",
       .bits = Bits::kNo,
       .of_a_machine = true},
      {.name = "disk_memory",
       .help =
           "With --disk, memory of what it may hold, such as 20GB (default: three times that of the largest layer).",
       .is_size = true,
       .bits = Bits::kNo,
       .of_a_machine = true},
      {.name = "disk_holds",
       .help = "With --disk, masters: what fp32 masters have beyond 16-bit weights as well, which costs traffic.",
       .otherwise = disk_holds_names().front(),
       .choices = disk_holds_names(),
       .bits = Bits::kNo,
       .of_a_machine = true},
      {.name = "microbatches", .help = "Parts of a step (default: one more than devices).", .least = 1},
      {.name = "recompute_by_layer", .help = "Keep less for the backward.", .otherwise = false, .bits = Bits::kNo},
      {.name = "fault_tolerant", .help = "Go on when a device fails.", .otherwise = false, .bits = Bits::kNo},
  };
}

std::string joined(const Texts& texts, const char* between) {
  std::string all;
  for (const std::string& text : texts) all += (all.empty() ? "" : between) + text;
  return all;
}

[[noreturn]] void refuse(std::string_view name, const OptionValue& value, std::string_view expected) {
  throw std::invalid_argument(
      concat("[train] ", option_flag(name), " is ", option_text(value), ", expected ", expected));
}

// As it was given, or its default.
OptionValue value_of(const OptionValues& values, std::string_view name) {
  const auto found = values.find(name);
  const bool is_given = found != values.end() && !std::holds_alternative<std::monostate>(found->second);
  return is_given ? found->second : training_option(name).otherwise;
}

bool is_given(const OptionValues& values, std::string_view name) {
  return value_of(values, name) != training_option(name).otherwise;
}

bool is_set(const OptionValues& values, std::string_view name) {
  const OptionValue value = value_of(values, name);
  const auto* const flag = std::get_if<bool>(&value);
  const auto* const text = std::get_if<std::string>(&value);
  return (flag != nullptr && *flag) || (text != nullptr && !text->empty());
}

std::string text_of(const OptionValues& values, std::string_view name) { return option_text(value_of(values, name)); }

// None: it has no number.
std::optional<double> number_of(const OptionValue& value) {
  if (const auto* const count = std::get_if<int64_t>(&value)) return static_cast<double>(*count);
  if (const auto* const number = std::get_if<double>(&value)) return *number;
  return std::nullopt;
}

int64_t count_of(const OptionValues& values, std::string_view name) {
  return static_cast<int64_t>(number_of(value_of(values, name)).value());
}

bool is_size(const std::string& text) {
  try {
    return parse_bytes(text, "") > 0;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

void check_range(const TrainingOption& option, const OptionValue& value) {
  if (const auto* const text = std::get_if<std::string>(&value)) {
    const bool is_choice = std::ranges::find(option.choices, *text) != option.choices.end();
    if (option.is_size && !is_choice && !is_size(*text)) {
      refuse(option.name, value, "bytes above 0 and their unit, such as 20GB");
    }
    if (!option.is_size && !option.choices.empty() && !is_choice) {
      refuse(option.name, value, concat("one of ", joined(option.choices, ", ")));
    }
  }
  const std::optional<double> number = number_of(value);
  if (!number) return;
  const bool is_enough = option.above ? *number > option.least : *number >= option.least;
  const bool is_little = option.below ? *number < option.most : *number <= option.most;
  if (is_enough && is_little && !std::isinf(*number)) return;
  std::string expected = concat(option.above ? "above " : "at least ", number_text(option.least));
  if (!std::isinf(option.most))
    expected += concat(option.below ? " and less than " : " and at most ", number_text(option.most));
  refuse(option.name, value, expected);
}

void check_adapters(const OptionValues& values) {
  if (is_set(values, "lora") + is_set(values, "dora") + is_set(values, "adapter") > 1) {
    throw std::invalid_argument(concat("[train] --lora", values.contains("dora") ? ", --dora" : "",
                                       " and --adapter are for different runs, expected one of them"));
  }
  if (is_set(values, "lora") || is_set(values, "dora")) return;
  for (const std::string& name : of_lora()) {
    if (!is_given(values, name)) continue;
    refuse(name, value_of(values, name), concat("it only with --lora", values.contains("dora") ? " or --dora" : ""));
  }
}

void check_quantised(const OptionValues& values) {
  if (is_given(values, "quantise") && !trains_adapters(values)) {
    refuse("quantise", value_of(values, "quantise"), "it only where adapters train on frozen weights: with --lora");
  }
  if (is_given(values, "quantise_keep") && !is_given(values, "quantise"))
    refuse("quantise_keep", value_of(values, "quantise_keep"), "it only with --quantise");
}

void check_update_rule(const OptionValues& values) {
  const std::string rule = text_of(values, "optimizer");
  if (text_of(values, "moments") == "8bit" && rule != "adam" && rule != "adamw") {
    refuse("moments", std::string("8bit"), concat("fp32 for ", rule));
  }
  if (text_of(values, "masters") == "24bit" && is_given(values, "dtype") && text_of(values, "dtype") != "bfloat16") {
    refuse("masters", std::string("24bit"), concat("fp32 for weights of ", text_of(values, "dtype")));
  }
  const bool at_once = is_set(values, "gradients_at_once");
  const std::string clip_by = text_of(values, "clip_by");
  const bool by_own = clip_by == "norm";
  const bool clips = *number_of(value_of(values, "clip")) > 0;
  if (!by_own && !at_once) refuse("clip_by", clip_by, "norm, or --gradients-at-once with it");
  if (clip_by == kTwoPasses && !clips)
    refuse("clip_by", clip_by, "norm with --clip 0, which has no use for two passes");
  if (at_once && is_set(values, "asynchronous"))
    refuse("gradients_at_once", true, "it without --asynchronous, whose updates come later");
  if (at_once && text_of(values, "dtype") == "float16")
    refuse("gradients_at_once", true, "it with weights in bfloat16 or float32, whose losses are not scaled");
  if (at_once && by_own && clips) {
    refuse("gradients_at_once", true,
           "--clip-by last_norm, --clip-by two_passes or --clip 0 with it, as the norm of a step needs all of its "
           "gradients");
  }
  if (is_given(values, "disk_memory") && !is_given(values, "disk")) {
    refuse("disk_memory", value_of(values, "disk_memory"), "it only with --disk");
  }
  if (text_of(values, "disk_holds") == "masters" && !is_given(values, "disk")) {
    refuse("disk_holds", value_of(values, "disk_holds"), "it only with --disk");
  }
  for (const OfSomeRules& option : of_some_rules()) {
    if (!is_given(values, option.name) || option.has(rule)) continue;
    refuse(option.name, value_of(values, option.name),
           concat("it only for ", joined(option.rules, ", "), ", not for ", rule));
  }
}

}  // namespace

const std::vector<TrainingOption>& training_options() {
  static const std::vector<TrainingOption> options = make_options();
  return options;
}

const TrainingOption& training_option(std::string_view name) {
  const auto found = std::ranges::find(training_options(), name, &TrainingOption::name);
  if (found != training_options().end()) return *found;
  throw std::invalid_argument(concat("[train] there is no option ", name, ", expected one of a training run"));
}

void check_training_options(const OptionValues& values) {
  for (const TrainingOption& option : training_options()) check_range(option, value_of(values, option.name));
  check_adapters(values);
  check_quantised(values);
  check_update_rule(values);
  const int64_t length = count_of(values, "length");
  if (tokens_of_step(values) < length) {
    refuse("batch_tokens", value_of(values, "batch_tokens"), concat("at least --length, which is ", length));
  }
  if (!is_given(values, "steps")) return;
  learning_rate(values, count_of(values, "steps"));
  if (*number_of(value_of(values, "epochs")) != 1) {
    throw std::invalid_argument("[train] --steps and --epochs are given, expected one of them");
  }
}

void check_options_of_nodes(const OptionValues& values, int nodes) {
  if (nodes > 1 && text_of(values, "clip_by") == kTwoPasses)
    refuse("clip_by", kTwoPasses, "last_norm over several nodes: a first pass measures one node's part");
}

std::string option_flag(std::string_view name) {
  std::string flag = concat("--", name);
  std::ranges::replace(flag, '_', '-');
  return flag;
}

std::string option_text(const OptionValue& value) {
  if (const auto* const flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* const count = std::get_if<int64_t>(&value)) return std::to_string(*count);
  if (const auto* const number = std::get_if<double>(&value)) return number_text(*number);
  if (const auto* const text = std::get_if<std::string>(&value)) return *text;
  const auto* const texts = std::get_if<Texts>(&value);
  return texts == nullptr ? "" : joined(*texts, ",");
}

OptionValues fixed_training_options(const OptionValues& values) {
  OptionValues fixed;
  for (const TrainingOption& option : training_options()) {
    const bool depends = option.bits == Bits::kIfAsynchronous && is_set(values, "asynchronous");
    const auto found = values.find(option.name);
    if (found != values.end() && (option.bits == Bits::kYes || depends)) fixed.insert(*found);
  }
  if (text_of(fixed, "clip_by") == kTwoPasses) fixed["clip_by"] = std::string("norm");  // they have the same bits
  return fixed;
}

void require_same_options(const OptionValues& before, const OptionValues& now, std::string_view run) {
  const auto value_in = [](const OptionValues& values, const std::string& name) {
    const auto found = values.find(name);
    return found == values.end() ? OptionValue{} : found->second;
  };
  const auto shown = [](const OptionValue& value) { return value.index() == 0 ? "not given" : option_text(value); };
  OptionValues all = before;
  all.insert(now.begin(), now.end());
  for (const auto& [name, _] : all) {
    const OptionValue was = value_in(before, name), is = value_in(now, name);
    const std::optional<double> number = number_of(was);
    if (was == is || (number && number == number_of(is))) continue;
    throw std::invalid_argument(concat("[train] ", option_flag(name), " is ", shown(is), ", expected ", shown(was),
                                       " as in ", run, ", which --resume goes on with"));
  }
}

bool trains_adapters(const OptionValues& values) {
  return is_set(values, "lora") || is_set(values, "dora") || is_set(values, "adapter");
}

double highest_learning_rate(const OptionValues& values) {
  if (const std::optional<double> given = number_of(value_of(values, "learning_rate"))) return *given;
  return trains_adapters(values) ? kAdapterRate : kFullRate;
}

UpdateRule update_rule(const OptionValues& values) {
  UpdateRule rule(algorithms().at(text_of(values, "optimizer")));
  rule.options.lr = highest_learning_rate(values);
  rule.options.weight_decay = number_of(value_of(values, "weight_decay")).value();
  for (const OfSomeRules& option : of_some_rules()) {
    const std::optional<double> given = number_of(value_of(values, option.name));
    if (given && !option.is_beside_muon(text_of(values, "optimizer"))) rule.options.*option.member = *given;
  }
  // So that one learning rate suits both rules.
  rule.options.match_rms_adamw = rule.algorithm == optim::Algorithm::kMuon;
  return rule;
}

std::vector<ParameterGroup> parameter_groups(const OptionValues& values) {
  const std::map<std::string, double> beside = beside_muon(values);
  optim::GivenHyperparameters others;
  if (!beside.empty()) {
    others = {.beta1 = beside.at("beta1"), .beta2 = beside.at("beta2"), .eps = beside.at("eps"), .use_muon = false};
  }
  std::vector<ParameterGroup> groups;
  // Adapters are matrices of layers.
  if (trains_adapters(values)) return groups;
  groups.push_back({[](const std::string& name, const at::Tensor&) { return !optim::has_weight_decay(name); }, others});
  groups[0].options.weight_decay = 0;
  if (!beside.empty()) {
    const auto is_for_adamw = [](const std::string& name, const at::Tensor& parameter) {
      return !optim::is_for_muon(name, parameter.sizes());
    };
    groups.push_back({is_for_adamw, others});
  }
  return groups;
}

std::map<std::string, double> beside_muon(const OptionValues& values) {
  std::map<std::string, double> own;
  const optim::Hyperparameters adamw = optim::default_hyperparameters(optim::Algorithm::kAdamW);
  for (const OfSomeRules& option : of_some_rules()) {
    if (option.is_beside_muon(text_of(values, "optimizer")))
      own[option.name] = number_of(value_of(values, option.name)).value_or(adamw.*option.member);
  }
  return own;
}

std::map<std::string, double> rule_options(const OptionValues& values) {
  const optim::Hyperparameters all = update_rule(values).options;
  std::map<std::string, double> own = {{"lr", all.lr}, {"weight_decay", all.weight_decay}};
  if (all.match_rms_adamw) own["match_rms_adamw"] = 1;
  for (const OfSomeRules& option : of_some_rules()) {
    const std::string rule = text_of(values, "optimizer");
    if (option.has(rule) && !option.is_beside_muon(rule)) own[option.name] = all.*option.member;
  }
  return own;
}

LearningRate learning_rate(const OptionValues& values, int64_t steps) {
  const int64_t warmup = count_of(values, "warmup_steps");
  if (warmup > steps) {
    refuse("warmup_steps", warmup, concat("at most the number of steps, which is ", steps));
  }
  const std::string schedule = text_of(values, "schedule");
  const double floor = number_of(value_of(values, "floor")).value();
  if (schedule == "linear") return linear_rate(warmup, steps, floor);
  if (schedule == "cosine") return cosine_rate(warmup, steps, floor);
  return warmup_rate(warmup);
}

int64_t tokens_of_step(const OptionValues& values) {
  if (const std::optional<double> given = number_of(value_of(values, "batch_tokens"))) {
    return static_cast<int64_t>(*given);
  }
  return kRowsOfAStep * count_of(values, "length");
}

std::string note_of_few_steps(const OptionValues& values, int64_t steps) {
  constexpr int64_t kFew = 20;
  if (steps >= kFew || is_given(values, "steps")) return {};
  return concat(
      "[train] the data make ", steps, steps == 1 ? " step" : " steps", " of up to ", tokens_of_step(values),
      " tokens, from which a model hardly learns; a smaller --batch-tokens makes more of them, and so do more "
      "--epochs");
}

}  // namespace roundpipe
