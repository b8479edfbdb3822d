#include <roundpipe/command/training_options.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

using namespace roundpipe;

namespace {

std::string refusal(const OptionValues& values) {
  try {
    check_training_options(values);
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

using Case = std::pair<OptionValues, std::string>;

}  // namespace

TEST_CASE("training options: what is not given is fine, and so is each default") {
  OptionValues values;
  CHECK(refusal(values).empty());
  for (const TrainingOption& option : training_options()) values[option.name] = option.otherwise;
  CHECK(refusal(values).empty());
  CHECK_THROWS_AS(training_option("learning-rate"), std::invalid_argument);
}

TEST_CASE("training options: a value out of its range is named") {
  for (const std::string name : {"steps", "evaluate_every", "log_every", "save_every", "keep", "microbatches"}) {
    CHECK(refusal({{name, int64_t{1}}}).empty());
    CHECK(refusal({{name, int64_t{0}}}).ends_with(" is 0, expected at least 1"));
  }
  for (const auto& [values, said] : std::vector<Case>{
           {{{"epochs", int64_t{0}}}, "--epochs is 0, expected above 0"},
           {{{"epochs", std::nan("")}}, "--epochs is nan, expected above 0"},
           {{{"length", int64_t{1}}}, "--length is 1, expected at least 2"},
           {{{"warmup_steps", int64_t{-1}}}, "--warmup-steps is -1, expected at least 0"},
           {{{"seed", int64_t{1} << 32}}, "--seed is 4294967296, expected at least 0 and at most 4294967295"},
           {{{"learning_rate", 0.0}}, "--learning-rate is 0, expected above 0"},
           {{{"learning_rate", HUGE_VAL}}, "--learning-rate is inf, expected above 0"},
           {{{"weight_decay", -0.5}}, "--weight-decay is -0.5, expected at least 0"},
           {{{"clip", std::nan("")}}, "--clip is nan, expected at least 0"},
           {{{"floor", 1.5}}, "--floor is 1.5, expected at least 0 and at most 1"},
           {{{"beta1", 1.0}}, "--beta1 is 1, expected at least 0 and less than 1"},
           {{{"eps", 0.0}}, "--eps is 0, expected above 0"},
           {{{"lora", true}, {"lora_rank", int64_t{0}}}, "--lora-rank is 0, expected at least 1"},
           {{{"lora", true}, {"lora_alpha", 0.0}}, "--lora-alpha is 0, expected above 0"},
           {{{"lora", true}, {"lora_dropout", 1.0}}, "--lora-dropout is 1, expected at least 0 and less than 1"},
           {{{"dtype", std::string("float8")}}, "--dtype is float8, expected one of float32, bfloat16, float16"},
       }) {
    CHECK(refusal(values) == "[train] " + said);
  }
}

TEST_CASE("training options: values that do not fit each other are named") {
  const std::string lion = "lion", eight = "8bit", sgd = "sgd", folder = "a", narrow = "24bit", half = "float16";
  const std::string last = "last_norm", passes = kTwoPasses;
  const std::vector<std::string> targets = {"q_proj"};
  for (const auto& [values, said] : std::vector<Case>{
           {{{"lora", true}, {"adapter", folder}}, "--lora and --adapter are for different runs"},
           {{{"lora", true}, {"dora", true}}, "--lora, --dora and --adapter are for different runs"},
           {{{"lora_rank", int64_t{4}}}, "--lora-rank is 4, expected it only with --lora"},
           {{{"lora_rank", int64_t{4}}, {"dora", false}}, "expected it only with --lora or --dora"},
           {{{"lora_targets", targets}}, "--lora-targets is q_proj, expected it only with --lora"},
           {{{"moments", eight}, {"optimizer", lion}}, "--moments is 8bit, expected fp32 for lion"},
           {{{"masters", narrow}, {"dtype", half}}, "--masters is 24bit, expected fp32 for weights of float16"},
           {{{"clip_by", last}}, "--clip-by is last_norm, expected norm, or --gradients-at-once with it"},
           {{{"clip_by", passes}}, "--clip-by is two_passes, expected norm, or --gradients-at-once with it"},
           {{{"clip_by", passes}, {"gradients_at_once", true}, {"clip", 0.0}}, "which has no use for two passes"},
           {{{"gradients_at_once", true}, {"clip_by", last}, {"dtype", half}},
            "expected it with weights in bfloat16 or float32"},
           {{{"gradients_at_once", true}}, "expected --clip-by last_norm, --clip-by two_passes or --clip 0 with it"},
           {{{"gradients_at_once", true}, {"clip", 0.0}, {"asynchronous", true}}, "expected it without --asynchronous"},
           {{{"eps", 1e-8}, {"optimizer", sgd}},
            "--eps is 1e-08, expected it only for adam, adamw, rmsprop, muon, not for sgd"},
           {{{"momentum", 0.9}}, "--momentum is 0.9, expected it only for sgd, rmsprop, muon, not for adamw"},
           {{{"batch_tokens", int64_t{2047}}}, "--batch-tokens is 2047, expected at least --length, which is 2048"},
           {{{"steps", int64_t{5}}, {"warmup_steps", int64_t{6}}},
            "--warmup-steps is 6, expected at most the number of steps, which is 5"},
           {{{"steps", int64_t{5}}, {"epochs", 2.0}}, "--steps and --epochs are given, expected one of them"},
       }) {
    CHECK_MESSAGE(refusal(values).find(said) != std::string::npos, refusal(values));
  }
  CHECK(refusal({{"gradients_at_once", true}, {"clip_by", last}}).empty());
  CHECK(refusal({{"gradients_at_once", true}, {"clip_by", passes}}).empty());
  CHECK_NOTHROW(check_options_of_nodes({{"clip_by", passes}}, 1));
  CHECK_THROWS_WITH_AS(check_options_of_nodes({{"clip_by", passes}}, 2),
                       doctest::Contains("[train] --clip-by is two_passes, expected last_norm over several nodes"),
                       std::invalid_argument);
  CHECK(refusal({{"lora_rank", int64_t{8}}}).empty());  // the default, which a file of a run has
  CHECK(refusal({{"dora", true}, {"lora_rank", int64_t{4}}, {"lora_targets", targets}}).empty());
}

TEST_CASE("training options: what belongs to the bits") {
  OptionValues values = {{"seed", int64_t{3}}, {"keep", int64_t{2}}, {"evaluate_every", int64_t{5}}, {"other", true}};
  CHECK((fixed_training_options(values) == OptionValues{{"seed", int64_t{3}}}));
  values["asynchronous"] = true;
  const OptionValues all = {{"seed", int64_t{3}}, {"evaluate_every", int64_t{5}}, {"asynchronous", true}};
  CHECK((fixed_training_options(values) == all));
  const auto clipped = [](const char* by) { return fixed_training_options({{"clip_by", std::string(by)}}); };
  CHECK((clipped(kTwoPasses) == clipped("norm")));
  CHECK((clipped("last_norm") != clipped("norm")));
}

TEST_CASE("training options: defaults that depend on others") {
  CHECK(!trains_adapters({{"lora", false}, {"length", int64_t{16}}}));
  CHECK(trains_adapters({{"dora", true}}));
  CHECK(highest_learning_rate({}) == 2e-5);
  CHECK(highest_learning_rate({{"lora", true}}) == 2e-4);
  CHECK(highest_learning_rate({{"adapter", std::string("a")}}) == 2e-4);
  CHECK(highest_learning_rate({{"adapter", std::string("a")}, {"learning_rate", 1e-3}}) == 1e-3);
  CHECK(tokens_of_step({}) == 8 * 2048);
  CHECK(tokens_of_step({{"length", int64_t{16}}}) == 128);
  CHECK(tokens_of_step({{"length", int64_t{16}}, {"batch_tokens", int64_t{40}}}) == 40);
}

TEST_CASE("training options: how the learning rate goes") {
  const auto rates = [](const OptionValues& values, int64_t steps) {
    std::vector<double> all;
    for (int64_t step = 0; step < steps + 2; ++step) all.push_back(learning_rate(values, steps)(step));
    return all;
  };
  const OptionValue linear = std::string("linear"), constant = std::string("constant"), two = int64_t{2};
  CHECK(rates({{"schedule", linear}}, 4) == std::vector<double>{1, 0.75, 0.5, 0.25, 0, 0});
  CHECK(rates({{"schedule", linear}, {"floor", 0.5}}, 2) == std::vector<double>{1, 0.75, 0.5, 0.5});
  CHECK(rates({{"schedule", linear}, {"warmup_steps", two}}, 2) == std::vector<double>{0.5, 1, 0, 0});
  CHECK(rates({{"schedule", constant}, {"warmup_steps", two}}, 4) == std::vector<double>{0.5, 1, 1, 1, 1, 1});
  CHECK(rates({}, 4)[1] == doctest::Approx(0.853553));  // a cosine
  CHECK_THROWS_WITH_AS(learning_rate({{"warmup_steps", two}}, 1),
                       "[train] --warmup-steps is 2, expected at most the number of steps, which is 1",
                       std::invalid_argument);
}

TEST_CASE("training options: the update rule has its own defaults") {
  using Options = std::map<std::string, double>;
  const auto with = [](const char* rule, OptionValues values) {
    values["optimizer"] = std::string(rule);
    return rule_options(values);
  };
  CHECK(rule_options({}) ==
        Options{{"lr", 2e-5}, {"weight_decay", 0}, {"beta1", 0.9}, {"beta2", 0.999}, {"eps", 1e-8}});
  CHECK(with("lion", {{"beta2", 0.5}, {"weight_decay", 0.25}, {"lora", true}}) ==
        Options{{"lr", 2e-4}, {"weight_decay", 0.25}, {"beta1", 0.9}, {"beta2", 0.5}});
  CHECK(with("sgd", {{"momentum", 0.5}, {"learning_rate", 1.0}}) ==
        Options{{"lr", 1}, {"weight_decay", 0}, {"momentum", 0.5}});
  CHECK(with("adafactor", {}) == Options{{"lr", 2e-5}, {"weight_decay", 0}});
  CHECK(with("rmsprop", {{"eps", 1e-3}}) == Options{{"lr", 2e-5}, {"weight_decay", 0}, {"eps", 1e-3}, {"momentum", 0}});
  CHECK(with("muon", {{"momentum", 0.5}, {"eps", 1e-3}}) ==
        Options{{"lr", 2e-5}, {"weight_decay", 0}, {"momentum", 0.5}, {"match_rms_adamw", 1}});
  const UpdateRule rule = update_rule({{"optimizer", std::string("adafactor")}});
  CHECK(rule.algorithm == optim::Algorithm::kAdafactor);
  CHECK(rule.options.eps == std::numeric_limits<float>::epsilon());
}

TEST_CASE("training options: AdamW steps what Muon is not for") {
  const auto group_of = [](const std::vector<ParameterGroup>& groups, const char* name, const at::Tensor& parameter) {
    return std::ranges::find_if(groups, [&](const auto& group) { return group.holds(name, parameter); }) -
           groups.begin();
  };
  const at::Tensor matrix = at::ones({4, 4}), vector = at::ones({4});
  const OptionValues muon = {{"optimizer", std::string("muon")}, {"beta2", 0.5}, {"weight_decay", 0.25}};
  CHECK(beside_muon(muon) == std::map<std::string, double>{{"beta1", 0.9}, {"beta2", 0.5}, {"eps", 1e-8}});
  const std::vector<ParameterGroup> groups = parameter_groups(muon);
  REQUIRE(groups.size() == 2);
  CHECK(group_of(groups, "model.norm.weight", vector) == 0);
  CHECK(group_of(groups, "lm_head.weight", matrix) == 1);
  CHECK(group_of(groups, "model.layers.0.mlp.up_proj.weight", matrix) == 2);
  const UpdateRule rule = update_rule(muon);
  CHECK(rule.options.use_muon);
  CHECK(rule.options.eps == 1e-7);
  for (const ParameterGroup& group : groups) {
    const optim::Hyperparameters options = group.options.over(rule.options);
    CHECK_FALSE(options.use_muon);
    CHECK(options.beta2 == 0.5);
    CHECK(options.eps == 1e-8);
  }
  CHECK(groups[0].options.over(rule.options).weight_decay == 0);
  CHECK(groups[1].options.over(rule.options).weight_decay == 0.25);
  CHECK(beside_muon({}).empty());
  CHECK(parameter_groups({}).size() == 1);
  OptionValues adapters = muon;
  adapters["lora"] = true;
  CHECK(parameter_groups(adapters).empty());
}

TEST_CASE("training options: a run that goes on keeps them") {
  const OptionValues before = {{"seed", int64_t{0}}, {"clip", 1.0}, {"lora", false}, {"rows", std::string("packed")}};
  OptionValues now = before;
  require_same_options(before, now, "step-4");
  now["clip"] = int64_t{1};  // the same number
  now["dtype"] = OptionValue{};
  require_same_options(before, now, "step-4");
  now["seed"] = int64_t{1};
  CHECK_THROWS_WITH_AS(require_same_options(before, now, "step-4"),
                       "[train] --seed is 1, expected 0 as in step-4, which --resume goes on with",
                       std::invalid_argument);
  now = before;
  now.erase("rows");
  CHECK_THROWS_WITH_AS(require_same_options(before, now, "step-4"),
                       doctest::Contains("--rows is not given, expected packed as"), std::invalid_argument);
  now = before;
  now["lora_rank"] = int64_t{4};
  CHECK_THROWS_WITH_AS(require_same_options(before, now, "step-4"),
                       doctest::Contains("--lora-rank is 4, expected not given as"), std::invalid_argument);
}

TEST_CASE("training options: a run of few steps is told so, unless it was asked for") {
  const OptionValues values = {{"length", int64_t{64}}};
  CHECK(note_of_few_steps(values, 1).starts_with("[train] the data make 1 step of up to 512 tokens, "));
  CHECK(note_of_few_steps(values, 19).starts_with("[train] the data make 19 steps of "));
  CHECK(note_of_few_steps(values, 20).empty());
  CHECK(note_of_few_steps({{"length", int64_t{64}}, {"steps", int64_t{3}}}, 3).empty());
}
