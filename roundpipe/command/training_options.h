#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <roundpipe/api/learning_rate.h>
#include <roundpipe/api/optimizer.h>

namespace roundpipe {

// The value of an option; none: not given.
using OptionValue = std::variant<std::monostate, bool, int64_t, double, std::string, std::vector<std::string>>;
using OptionValues = std::map<std::string, OptionValue, std::less<>>;

// An option of a training run. `roundpipe train` and `roundpipe-train` take their defaults, ranges and help from here,
// and so does the file of a run. Python's copy of this table is written by tools/training_options.py.
struct TrainingOption {
  // Whether a training that goes on has to have the same value, since the bits depend on it.
  enum class Bits { kNo, kYes, kIfAsynchronous };

  std::string name;  // on the command line, with dashes
  std::string help;
  OptionValue otherwise = {};             // its value if it is not given; none: as `help` says
  std::vector<std::string> choices = {};  // of a text; empty: any
  bool is_size = false;                   // a number of bytes above 0 with a unit, or one of the choices
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  bool above = false;  // `least` itself is too little
  bool below = false;  // `most` itself is too much
  Bits bits = Bits::kYes;
  bool of_a_machine = false;  // may differ between the nodes of a run
};

const std::vector<TrainingOption>& training_options();
// Throws std::invalid_argument for an unknown name.
const TrainingOption& training_option(std::string_view name);

// Throws std::invalid_argument, which names the option, for a value out of its range, and for values that do not fit
// each other. Names that the table has not are left alone.
void check_training_options(const OptionValues& values);
// Throws std::invalid_argument, which names the option, for a value that so many nodes cannot train with.
void check_options_of_nodes(const OptionValues& values, int nodes);

// The option on the command line, such as "--lora-rank", and the text of a value there.
std::string option_flag(std::string_view name);
std::string option_text(const OptionValue& value);

// Of --clip-by: each step's batch runs twice, and the first pass only measures the norm.
inline constexpr const char* kTwoPasses = "two_passes";

// The values that belong to the bits of a training; one value of those that have the same bits.
OptionValues fixed_training_options(const OptionValues& values);
// Of a run that goes on: throws std::invalid_argument, which names the first value that is another than before. `run`
// is where those are from, in words.
void require_same_options(const OptionValues& before, const OptionValues& now, std::string_view run);

// Whether adapters are trained, and the model itself is frozen.
bool trains_adapters(const OptionValues& values);
// The learning rate after the warm-up: adapters learn with a higher one.
double highest_learning_rate(const OptionValues& values);
// The update rule; what is not given is the rule's own default.
UpdateRule update_rule(const OptionValues& values);
// Its hyperparameters that a run may choose or that are not the rule's own defaults, under the names of
// optim::Hyperparameters; one that is on is 1.
std::map<std::string, double> rule_options(const OptionValues& values);
// Of the AdamW that steps what Muon is not for, the same; empty for other rules.
std::map<std::string, double> beside_muon(const OptionValues& values);
// The parameters whose hyperparameters are others than the rule's: norms and biases have no weight decay, and AdamW
// steps what Muon is not for. Adapters have no such parameters.
std::vector<ParameterGroup> parameter_groups(const OptionValues& values);
// How the rate goes over a run of `steps` steps. Throws std::invalid_argument for a longer warm-up.
LearningRate learning_rate(const OptionValues& values, int64_t steps);
// The most tokens of a step.
int64_t tokens_of_step(const OptionValues& values);
// What to tell of a run whose data make so few steps that it hardly learns; empty: enough, or --steps asked for them.
std::string note_of_few_steps(const OptionValues& values, int64_t steps);

}  // namespace roundpipe
