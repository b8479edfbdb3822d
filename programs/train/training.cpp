#include "training.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>

#include <ATen/Context.h>

#include <roundpipe/api/devices.h>
#include <roundpipe/command/step_lines.h>
#include <roundpipe/command/step_record.h>
#include <roundpipe/command/training_options.h>
#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/skipped_steps.h>
#include <roundpipe/files/damage.h>
#include <roundpipe/files/fall_back.h>
#include <roundpipe/files/file_system.h>
#include <roundpipe/language/layers.h>
#include <roundpipe/language/lora.h>
#include <roundpipe/language/model_folder.h>
#include <roundpipe/memory/host_room.h>
#include <roundpipe/runs/load_checkpoint.h>
#include <roundpipe/runs/run_folders.h>
#include <roundpipe/runs/save_checkpoint.h>
#include <roundpipe/saving/stored_checkpoint.h>

#include "data.h"
#include "stop_signal.h"

namespace roundpipe::train {

namespace {

using Clock = std::chrono::steady_clock;

// Preemption is no failure: SIGTERM ends with 0 once everything is saved, Ctrl+C as shells expect it.
int status_after(int signal) { return signal == SIGTERM ? 0 : 128 + signal; }

const char* const kFixed = "roundpipe-train options";
const char* const kTokens = "roundpipe-train tokens";
const char* const kOrder = "roundpipe-train order";
constexpr int64_t kOrderOfRows = 1;  // another number: another order, of rows and of what is held out
const char* const kSkipped = "roundpipe-train skipped steps";

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::optional<int64_t> bytes_of(const std::string& size) {
  if (size.empty()) return std::nullopt;
  return parse_bytes(size, "train");
}

bool measures_steps(const Options& options) { return options.device_memory != "unmeasured"; }

std::optional<int64_t> device_budget(const Options& options) {
  return measures_steps(options) ? bytes_of(options.device_memory) : std::nullopt;
}

LanguageModelOptions model_options(const Options& options) {
  LanguageModelOptions made;
  if (!options.dtype.empty()) made.dtype = language::parse_dtype(options.dtype, "--dtype");
  made.layers.attention = attention_option(options);
  made.layers.arithmetic = parse_arithmetic(options.arithmetic);
  made.lora = lora_of(options);
  made.quantise = quantise_of(options);
  made.adapter = options.adapter;
  made.model.name = "roundpipe-train";
  RunOptions& run = made.model.run;
  if (options.microbatches) run.microbatches = *options.microbatches;
  if (options.recompute_by_layer) run.recompute_grain = RecomputeGrain::kLayer;
  run.fault_tolerant = options.fault_tolerant;
  made.model.measure_steps = measures_steps(options);
  made.model.device_memory = device_budget(options);
  return made;
}

Optimizer make_optimizer(LanguageModel& model, const Options& options, int64_t steps) {
  Optimizer optimizer(model.model(), update_rule(options), parameter_groups(options),
                      {.moments = moment_format(options),
                       .masters = master_format(options),
                       .gradients_at_once = options.gradients_at_once,
                       .disk = {.folder = options.disk,
                                .memory_bytes = bytes_of(options.disk_memory).value_or(0),
                                .holds = parse_disk_holds(options.disk_holds)}});
  optimizer.set_learning_rate(learning_rate(options, steps));
  return optimizer;
}

ClipBy clip_by(const Options& options) {
  if (options.clip_by == kTwoPasses) return ClipBy::kMeasuredNorm;
  return options.clip_by == "last_norm" ? ClipBy::kLastNorm : ClipBy::kNorm;
}

OptionValues option_values(const FixedOptions& options) {
  OptionValues values;
  for (const auto& [flag, text] : options) values[flag.substr(2)] = text;
  return values;
}

// With padding between documents of a row.
int64_t tokens_of(const LanguageBatch& batch) {
  return batch.attention_mask.defined() ? batch.attention_mask.sum().item<int64_t>() : batch.ids.numel();
}

// A launcher such as torchrun tells each of its processes how many there are.
void require_one_process() {
  const char* const processes = std::getenv("WORLD_SIZE");
  if (processes == nullptr || std::strtol(processes, nullptr, 10) <= 1) return;
  throw std::invalid_argument(concat("[train] WORLD_SIZE is ", processes,
                                     ": several processes were started, expected one, since each would train on all "
                                     "the tokens, into one folder; start one process, which uses all devices of the "
                                     "machine, or use the Python command `roundpipe train` for several machines"));
}

// A step whose line is not written yet.
struct UnloggedStep {
  StepRecord record;
  Step made;
};

// One run of the program.
class Training {
 public:
  explicit Training(const Options& options);
  int run();

 private:
  void check_folder();
  void check_memory();
  void resume();
  void check_fixed() const;
  void check_fixed_in(StoredCheckpoint stored) const;
  void train_steps();
  Model::Pending begin(const LanguageBatch& batch);
  void log();
  void evaluate_now(Clock::time_point& begun);
  void evaluate(int64_t step);
  void save(int64_t step, bool wait);
  void write_results();
  // Where the results go: a model, adapters, or both.
  std::string adapter_folder() const { return files::join(options_.out, "adapter"); }
  std::string model_folder() const { return files::join(options_.out, "model"); }
  bool writes_model() const { return !trains_adapters(options_) || options_.merge; }

  const Options& options_;
  const language::Config config_;
  const models::Attention attention_;
  Data data_;
  std::optional<std::string> checkpoint_;  // to resume from
  std::optional<StopSignal> stop_;
  std::unique_ptr<GradScaler> scaler_;  // null: no weights are in float16; outlives the calls of the model
  std::optional<LanguageModel> model_;
  std::optional<Optimizer> optimizer_;
  SkippedSteps skipped_;
  std::optional<StepLines> metrics_;
  int64_t step_ = 0;  // completed
  std::optional<UnloggedStep> unlogged_;
};

Training::Training(const Options& options)
    : options_(options),
      config_(language::read_config(options.model)),
      attention_(language::attention_of(config_, model_options(options).layers)),
      data_(options, config_) {
  const std::optional<LoraOptions> lora =
      options.adapter.empty() ? lora_of(options) : std::optional(language::read_lora(options.adapter));
  if (lora) language::check_lora(*lora, config_);
  if (options.merge && !config_.quantization.empty()) {
    throw std::invalid_argument(
        concat("[train] --merge is given and the weights of ", options.model,
               " are encoded, expected plain ones; roundpipe export --merge decodes them first"));
  }
  if (!options.devices.empty()) set_devices(options.devices);
  check_folder();
}

void Training::check_folder() {
  checkpoint_ = latest(options_.out);
  if (checkpoint_ && !options_.resume && !options_.dry_run) {
    throw std::invalid_argument(concat("[train] ", options_.out, " holds the checkpoint ", *checkpoint_,
                                       ", expected none; add --resume to go on from it, or name another folder"));
  }
  if (checkpoint_) check_fixed();
  if (trains_adapters(options_)) language::check_model_folder(adapter_folder(), options_.replace_model);
  if (writes_model()) language::check_model_folder(model_folder(), options_.replace_model);
}

void Training::check_memory() {
  const MemoryPrediction predicted = model_->predict_memory(data_.batch(step_));
  if (options_.dry_run) std::printf("predicted memory\n%s\n", predicted.text().c_str());
  const std::optional<int64_t> budget = bytes_of(options_.host_memory);
  if (budget && predicted.host.total() > *budget) {
    throw std::invalid_argument(
        concat("[train] the step is predicted to take ", format_bytes(predicted.host.total()),
               " of host memory, expected at most ", format_bytes(*budget),
               ", the --host-memory; use another --optimizer or --moments, or fewer or shorter rows"));
  }
  const int64_t of_device = predicted.device.total();
  if (const std::optional<int64_t> most = device_budget(options_); most && of_device > *most) {
    throw std::invalid_argument(concat("[train] the step is predicted to take ", format_bytes(of_device),
                                       " of a device, expected at most ", format_bytes(*most),
                                       ", the --device-memory; use more --microbatches, or shorter rows"));
  }
  for (const DeviceInfo& device : devices()) {
    if (device.limit_bytes == 0 || of_device <= device.limit_bytes) continue;
    throw std::invalid_argument(concat("[train] the step is predicted to take ", format_bytes(of_device),
                                       " of a device, and ", device.name, " has ", format_bytes(device.limit_bytes),
                                       "; use --recompute-by-layer, more --microbatches, or shorter rows"));
  }
}

void Training::resume() {
  if (!checkpoint_) return;
  const Loaded loaded = load_checkpoint(options_.out, model_->model(), *optimizer_, {.scaler = scaler_.get()});
  step_ = loaded.step;
  if (scaler_) skipped_ = SkippedSteps(loaded.value(kSkipped).as_int());
  std::printf("resumed from %s\n", loaded.folder.c_str());
}

// With the newest checkpoint whose state can be read; resume() tells what it passes over.
void Training::check_fixed() const {
  files::FallBack fall_back(options_.out, [](const std::string&) {});
  while (true) {
    const std::string folder = fall_back.next();
    try {
      return check_fixed_in(StoredCheckpoint(folder));
    } catch (const files::DamagedCheckpoint& damage) {
      fall_back.damaged(damage.what());
    }
  }
}

void Training::check_fixed_in(StoredCheckpoint stored) const {
  const auto saved = [&](const char* name) {
    const auto found = stored.state().at("state").find(name);
    if (found != stored.state().at("state").end()) return stored.value(found->begin().value(), name);
    throw std::invalid_argument(concat(
        "[train] ", stored.folder(), " was not saved by roundpipe-train, expected one of its own; name another --out"));
  };
  if (saved(kTokens).as_int() != data_.checksum()) {
    throw std::invalid_argument(concat("[train] ", stored.folder(), " was trained on other tokens than those of ",
                                       options_.tokens, "; name its own token file, or another --out"));
  }
  if (!stored.state().at("state").contains(kOrder) || saved(kOrder).as_int() != kOrderOfRows) {
    throw std::invalid_argument(concat("[train] ", stored.folder(),
                                       " was trained on rows in an order that is no longer ",
                                       "made, expected that of this version; finish it with the version that began it, "
                                       "or name another --out"));
  }
  FixedOptions before;
  const StateValue saved_options = saved(kFixed);
  for (const auto& [name, value] : saved_options.entries()) before[name.as_string()] = value.as_string();
  update_fixed_options(before, options_);
  require_same_options(option_values(before), option_values(fixed_options(options_, data_.steps(), attention_)),
                       stored.folder());
}

int Training::run() {
  if (options_.verify_tokens) data_.verify();
  std::printf("%s, %lld layers; %lld tokens in %lld rows of at most %lld; %lld steps of %lld rows\n",
              config_.model_type.c_str(), static_cast<long long>(config_.layers),
              static_cast<long long>(data_.training().tokens()), static_cast<long long>(data_.training().count()),
              static_cast<long long>(options_.length), static_cast<long long>(data_.steps()),
              static_cast<long long>(data_.rows_of_a_step()));
  if (const std::string note = note_of_few_steps(options_, data_.steps()); !note.empty())
    std::printf("%s\n", note.c_str());
  for (const DeviceInfo& device : devices()) std::printf("device %s\n", device.name.c_str());
  std::fflush(stdout);
  stop_.emplace();
  at::manual_seed(options_.seed);  // new adapters are drawn from it
  model_.emplace(options_.model, model_options(options_));
  if (model_->dtype() == at::kHalf) scaler_ = std::make_unique<GradScaler>();
  if (options_.dry_run) {
    optimizer_.emplace(make_optimizer(*model_, options_, data_.steps()));
    check_memory();
    return 0;
  }
  files::FileSystem::real().make_folders(options_.out);
  run_folder(options_.out);  // locked until the process ends
  optimizer_.emplace(make_optimizer(*model_, options_, data_.steps()));
  resume();
  check_memory();
  metrics_.emplace(files::join(options_.out, "metrics.jsonl"), step_);
  const int64_t first = step_;
  train_steps();
  if (const int signal = stop_->signal(); signal != 0 && step_ < data_.steps()) {
    if (step_ > first) save(step_, true);
    std::printf("stopped by signal %d after step %lld; add --resume to the command to go on\n", signal,
                static_cast<long long>(step_));
    return status_after(signal);
  }
  write_results();
  return 0;
}

void Training::write_results() {
  const language::ModelFolderOptions saving{.replace = options_.replace_model};
  if (trains_adapters(options_)) {
    model_->save_adapter(adapter_folder(), saving.replace);
    std::printf("trained; the adapter is in %s\n", adapter_folder().c_str());
  }
  if (!writes_model()) return;
  options_.merge ? model_->save_merged(model_folder(), saving) : model_->save(model_folder(), saving);
  std::printf("trained; the %s is in %s\n", options_.merge ? "merged model" : "model", model_folder().c_str());
}

Model::Pending Training::begin(const LanguageBatch& batch) {
  if (options_.clip_by == kTwoPasses) {
    const Model::Pending measured = model_->submit(batch, scaler_.get());
    log();  // of the step before, while the devices work
    model_->model().measure_gradients(*optimizer_);
  }
  return model_->submit(batch, scaler_.get());
}

void Training::train_steps() {
  const int64_t end = data_.steps();
  const double clip = options_.clip > 0 ? options_.clip : std::numeric_limits<double>::infinity();
  LanguageBatch batch = data_.batch(step_);
  Clock::time_point begun = Clock::now();
  while (step_ < end && stop_->signal() == 0) {
    Model::Pending pending = begin(batch);
    StepRecord record{.step = step_ + 1, .tokens = tokens_of(batch)};
    if (scaler_) record.loss_scale = scaler_->get_scale();
    log();  // of the step before, while the devices work
    if (step_ + 1 < end) batch = data_.batch(step_ + 1);
    record.loss = pending.finish().loss.item<double>() / record.loss_scale.value_or(1);
    record.learning_rate = optimizer_->options().lr;
    const Step made = model_->model().step(*optimizer_, {.asynchronous = options_.asynchronous,
                                                         .max_grad_norm = clip,
                                                         .clip_by = clip_by(options_),
                                                         .scaler = scaler_.get()});
    ++step_;
    const Clock::time_point before = std::exchange(begun, Clock::now());
    record.seconds = std::chrono::duration<double>(begun - before).count();
    unlogged_ = {record, made};
    const bool last = step_ == end;
    const auto is_due = [&](std::optional<int64_t> every) { return every && step_ % *every == 0; };
    const bool is_evaluated = data_.held_out().has_value() && is_due(options_.evaluate_every);
    if (is_evaluated) evaluate_now(begun);
    const bool is_saved = is_due(options_.save_every) || (last && options_.save_every);
    if (is_saved && scaler_) log();  // the checkpoint says how many steps were skipped
    if (is_saved) save(step_, last);
    // After the save, since a run that goes on from it with more steps would not evaluate here.
    if (data_.held_out() && last && !is_evaluated) evaluate_now(begun);
  }
  log();
}

void Training::log() {
  if (!unlogged_) return;
  auto [record, made] = *std::exchange(unlogged_, std::nullopt);
  record.grad_norm = made.grad_norm();
  if (record.loss_scale) {
    skipped_.add(record.step, made.skipped(), *record.loss_scale);
    record.skipped_steps = skipped_.count();
  }
  record.busy = model_->model().busy_share();
  for (const DeviceInfo& device : devices()) record.device_bytes = std::max(record.device_bytes, device.peak_bytes);
  record.host_bytes = memory::resident_bytes();
  metrics_->add(metrics_line(record.step, record.metrics()));
  if (record.step % options_.log_every != 0 && record.step != data_.steps()) return;
  std::printf("step %lld/%lld  %s\n", static_cast<long long>(record.step), static_cast<long long>(data_.steps()),
              record.text().c_str());
  std::fflush(stdout);
}

void Training::evaluate_now(Clock::time_point& begun) {
  log();
  evaluate(step_);
  begun = Clock::now();
}

void Training::evaluate(int64_t step) {
  // Also if a signal ends the evaluation: a run that is resumed then goes on as if it had not stopped. For the same
  // reason, its calls do not count among those that key random numbers.
  model_->model().synchronize();
  const std::shared_ptr<void> restored(
      nullptr, [this, calls = model_->model().calls()](void*) { model_->model().set_calls(calls); });
  double sum = 0;
  int64_t counted = 0;
  for (int64_t first = 0; first < data_.held_out()->count(); first += data_.rows_of_a_step()) {
    if (stop_->signal() != 0) return;
    const EvaluatedLoss loss = model_->evaluate(data_.held_out_batch(first));
    sum += loss.mean * static_cast<double>(loss.counted);
    counted += loss.counted;
  }
  const EvaluationRecord record{step, sum / static_cast<double>(counted), counted};
  metrics_->add(metrics_line(step, record.metrics()));
  std::printf("%s\n", record.text().c_str());
  std::fflush(stdout);
}

void Training::save(int64_t step, bool wait) {
  SaveOptions saving;
  saving.step = step;
  saving.keep_last = options_.keep;
  saving.wait = wait;
  saving.overwrite = true;
  std::vector<std::pair<std::string, StateValue>> fixed;
  for (const auto& [name, value] : fixed_options(options_, data_.steps(), attention_)) fixed.emplace_back(name, value);
  saving.state = {
      {kFixed, StateValue::dict(fixed)}, {kTokens, static_cast<int64_t>(data_.checksum())}, {kOrder, kOrderOfRows}};
  saving.scaler = scaler_.get();
  if (scaler_) saving.state.emplace_back(kSkipped, skipped_.count());
  saving.files = {{"config.json", read_text(files::join(options_.model, "config.json"))}};
  // The folder of the model holds what is frozen.
  saving.leaves_out = [](const std::string&, const at::Tensor& parameter) { return !parameter.requires_grad(); };
  const Save saved = save_checkpoint(options_.out, model_->model(), *optimizer_, saving);
  if (wait) std::printf("saved %s\n", saved.folder().c_str());
}

}  // namespace

int train(const Options& options) {
  require_one_process();
  return Training(options).run();
}

}  // namespace roundpipe::train
