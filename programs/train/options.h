#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>

#include <roundpipe/api/optimizer.h>
#include <roundpipe/language/options.h>
#include <roundpipe/tokens/rows.h>

namespace roundpipe::train {

// What the command line asks for. Defaults, ranges and help of most are those of `training_options()`; the members
// without comments are explained by --help.
struct Options {
  std::string model, tokens, out;
  bool lora = false, lora_rslora = false;
  int64_t lora_rank = 0;
  double lora_alpha = 0, lora_dropout = 0;
  std::vector<std::string> lora_targets;  // empty: all linear layers
  std::string adapter;
  std::string quantise;  // empty: nothing is encoded
  std::vector<std::string> quantise_keep;
  bool merge = false;
  std::string evaluation_file;  // empty: documents of `tokens` are held out
  bool resume = false, dry_run = false, verify_tokens = false, replace_model = false;

  int64_t length = 0;
  std::optional<int64_t> batch_tokens;
  std::string rows;
  bool in_order = false;
  double epochs = 0;
  std::optional<int64_t> steps;  // unset: by epochs
  int64_t evaluation_tokens = 0;
  std::optional<int64_t> evaluate_every;  // unset: at the end only
  uint64_t seed = 0;

  std::string optimizer, moments, masters, schedule;
  std::optional<double> learning_rate;
  double weight_decay = 0;
  std::optional<double> beta1, beta2, eps, momentum;  // unset: those of the update rule
  double clip = 0;                                    // 0: never
  int64_t warmup_steps = 0;
  double floor = 0;
  std::string clip_by;
  bool asynchronous = false, gradients_at_once = false;

  std::string dtype, arithmetic, attention, devices, device_memory, host_memory, disk, disk_memory, disk_holds;
  std::optional<int> microbatches;  // unset: the engine's choice
  bool recompute_by_layer = false, fault_tolerant = false;

  std::optional<int64_t> save_every;  // unset: at the end and when stopped
  int64_t keep = 0;
  int64_t log_every = 0;
};

// The exit status for a mistake of the caller's.
inline constexpr int kMistakeStatus = 2;

// Reads the command line. Returns the exit status when there is nothing to run: help, a version or a mistake, which has
// been printed. Numbers are within their ranges then, and names are known.
std::optional<int> read_options(int argc, const char* const* argv, Options& options);

// The words of the options.
int64_t tokens_of_step(const Options& options);
std::string note_of_few_steps(const Options& options, int64_t steps);
UpdateRule update_rule(const Options& options);
std::vector<ParameterGroup> parameter_groups(const Options& options);
optim::MomentFormat moment_format(const Options& options);
optim::MasterFormat master_format(const Options& options);
LearningRate learning_rate(const Options& options, int64_t steps);
// None: the model's own, for padded rows.
std::optional<models::Attention> attention_option(const Options& options);
// None without --lora.
std::optional<LoraOptions> lora_of(const Options& options);
// How its frozen weights are encoded; unset: they are not.
std::optional<QuantiseOptions> quantise_of(const Options& options);
// Whether adapters are trained, new ones or those of --adapter.
bool trains_adapters(const Options& options);

// The options that belong to the bits of a training, as text, by their names on the command line: a run that resumes
// has to have the same.
using FixedOptions = std::map<std::string, std::string>;
// `attention`: what the model uses.
FixedOptions fixed_options(const Options& options, int64_t steps, models::Attention attention);
// Brings those of an older checkpoint to today's form; what it did not say was as `options` are.
void update_fixed_options(FixedOptions& before, const Options& options);

}  // namespace roundpipe::train
