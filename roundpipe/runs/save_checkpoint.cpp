#include <roundpipe/runs/save_checkpoint.h>

#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <thread>

#include <roundpipe/checkpoint/json_text.h>
#include <roundpipe/checkpoint/manifest.h>
#include <roundpipe/checkpoint/steps.h>
#include <roundpipe/core/clock.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/memory/host_room.h>
#include <roundpipe/runs/capture.h>
#include <roundpipe/runs/run_folders.h>
#include <roundpipe/saving/tensor_files.h>

namespace roundpipe {

using checkpoint::RunFolder;
using checkpoint::StepWriter;
using nlohmann::ordered_json;

namespace {

constexpr int64_t kShard_bytes = 5'000'000'000;
constexpr int kThreads = 2;

// A file to write.
struct LaidOut {
  std::string name;
  std::vector<CapturedTensor> tensors;
  checkpoint::SafetensorsLayout layout;
};

LaidOut lay_out(std::string name, std::vector<CapturedTensor> tensors) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const CapturedTensor& item : tensors) named.emplace_back(item.name, item.tensor);
  checkpoint::SafetensorsLayout layout = saving::lay_out(named);
  return {std::move(name), std::move(tensors), std::move(layout)};
}

// The tensors of a section in shards of at most kShard_bytes.
std::vector<LaidOut> files_of(const Capture::Section& section) {
  std::vector<int64_t> bytes;
  for (const CapturedTensor& item : section.second) bytes.push_back(static_cast<int64_t>(item.tensor.nbytes()));
  const std::vector<size_t> counts = saving::shard_counts(bytes, kShard_bytes);
  std::vector<LaidOut> files;
  auto first = section.second.begin();
  for (size_t i = 0; i < counts.size(); ++i) {
    const auto last = first + static_cast<std::ptrdiff_t>(counts[i]);
    files.push_back(lay_out(saving::shard_name(section.first, i, counts.size()), {first, last}));
    first = last;
  }
  return files;
}

// The index that transformers reads beside several shards of weights.
std::optional<std::string> index_of(const std::vector<LaidOut>& files) {
  ordered_json weights = ordered_json::object();
  int64_t total = 0;
  for (const LaidOut& file : files) {
    if (!file.name.starts_with(concat(kWeights, "-"))) continue;
    for (const CapturedTensor& item : file.tensors) {
      weights[item.name] = file.name;
      total += static_cast<int64_t>(item.tensor.nbytes());
    }
  }
  if (weights.empty()) return std::nullopt;
  return checkpoint::print_json({{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weights)}},
                                "save_checkpoint");
}

constexpr const char* kIndexFile = "model.safetensors.index.json";

// Throws std::invalid_argument for names of files that a checkpoint has itself.
void check_files(const SaveOptions& options) {
  for (const auto& [name, text] : options.files) {
    if (checkpoint::is_file_name(name) && name != kStateFile && name != kIndexFile && !name.ends_with(".safetensors"))
      continue;
    throw std::invalid_argument(concat("[save_checkpoint] '", checkpoint::shown(name),
                                       "' cannot be a small file of the program's own, expected a plain name that no "
                                       "file of the checkpoint has"));
  }
}

void check(const SaveOptions& options) {
  const auto require = [](const char* name, int64_t value, int64_t least) {
    if (value >= least) return;
    throw std::invalid_argument(concat("[save_checkpoint] ", name, " is ", value, ", expected at least ", least));
  };
  require("step", options.step.value_or(0), 0);
  require("keep_last", options.keep_last.value_or(1), 1);
  require("keep_every", options.keep_every, 0);
  require("snapshot_memory_bytes", options.snapshot_memory_bytes.value_or(0), 0);
  if (options.keep_every != 0 && !options.keep_last) {
    throw std::invalid_argument(
        "[save_checkpoint] keep_every has no effect without keep_last, expected both; give keep_last");
  }
  check_files(options);
}

int64_t step_of(const SaveOptions& options) {
  if (options.step) return *options.step;
  throw std::invalid_argument(
      "[save_checkpoint] the step's number is not known without a roundpipe::Optimizer, expected SaveOptions::step");
}

// Half of the free memory, and at least two blocks with moments in fp32.
int64_t default_memory(const Model& model) {
  int64_t largest = 0;
  for (const runtime::BlockState& block : model.shared_pipeline()->model().blocks) {
    int64_t bytes = 0;
    for (const memory::NamedTensor& parameter : block.block->parameters())
      bytes += static_cast<int64_t>(parameter.tensor.nbytes()) + 12 * parameter.tensor.numel();
    largest = std::max(largest, bytes);
  }
  return std::max(memory::free_host_bytes() / 2, 2 * largest);
}

}  // namespace

struct Save::Work {
  int64_t step = 0;
  std::string folder;
  SaveOptions options;
  std::shared_ptr<RunFolder> run;
  std::shared_ptr<saving::SnapshotMemory> memory;
  std::unique_ptr<Capture> capture;  // until the state may change
  double began_ms = now_ms();
  const device::EventPtr read = device::make_event();  // the state may change
  const device::EventPtr over = device::make_event();
  // Written before `over` fires.
  SaveReport report;
  std::exception_ptr error;
  bool placed = false;  // complete, whatever the error

  void run_all() noexcept;
  void write();
  void commit(StepWriter& writer);
};

void Save::Work::write() {
  capture->finish();
  std::vector<LaidOut> files;
  for (const Capture::Section& section : capture->sections()) {
    for (LaidOut& file : files_of(section)) files.push_back(std::move(file));
  }
  std::vector<CapturedTensor> values;
  for (auto& [name, tensor] : capture->values()) values.push_back({name, tensor, std::nullopt});
  if (!values.empty()) files.push_back(lay_out(kStateTensors, std::move(values)));
  std::map<std::string, std::string> texts = options.files;
  if (const std::optional<std::string> index = index_of(files)) texts[kIndexFile] = *index;
  texts[kStateFile] = checkpoint::print_json(capture->state(), "save_checkpoint", /*one_line=*/true);
  for (const LaidOut& file : files) report.bytes += file.layout.file_bytes;
  for (const auto& [name, text] : texts) report.bytes += static_cast<int64_t>(text.size());

  const std::unique_ptr<StepWriter> writer = run->begin(step, {report.bytes, options.overwrite});
  std::vector<saving::Target> targets(capture->snapshot() != nullptr ? capture->snapshot()->pieces().size() : 0);
  std::vector<std::pair<saving::Target, at::Tensor>> plain;
  for (const LaidOut& file : files) {
    checkpoint::OutputFile& output = writer->create(file.name, file.layout.file_bytes);
    output.write_at(0, file.layout.header.data(), static_cast<int64_t>(file.layout.header.size()));
    for (size_t i = 0; i < file.tensors.size(); ++i) {
      const saving::Target target{&output, file.layout.tensors[i].offset};
      if (file.tensors[i].piece)
        targets.at(*file.tensors[i].piece) = target;
      else
        plain.emplace_back(target, file.tensors[i].tensor);
    }
  }
  if (capture->snapshot() != nullptr) {
    capture->snapshot()->write(
        [&](size_t piece, const at::Tensor& tensor) { saving::write_tensor(targets.at(piece), tensor); }, kThreads);
  }
  for (const auto& [target, tensor] : plain) saving::write_tensor(target, tensor);
  read->fire();
  for (const auto& [name, text] : texts) writer->add_small(name, text);
  commit(*writer);
  if (!options.keep_last) return;
  for (const std::string& notice : run->prune({*options.keep_last, options.keep_every, step}).notices)
    tell_user("[save_checkpoint] " + notice);
}

void Save::Work::commit(StepWriter& writer) {
  try {
    writer.commit(capture->state().at("versions").get<std::map<std::string, std::string>>());
  } catch (...) {
    placed = writer.placed();
    throw;
  }
  placed = true;
}

void Save::Work::run_all() noexcept {
  try {
    write();
  } catch (...) {
    error = std::current_exception();
  }
  if (capture->snapshot() != nullptr) capture->snapshot()->cancel();
  capture.reset();
  if (error && !options.wait) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& told) {
      tell_user(checkpoint::failed_save_notice(step, told.what(), placed));
    } catch (...) {
      tell_user(checkpoint::failed_save_notice(step, "[save_checkpoint] the save has failed", placed));
    }
  }
  report.seconds = (now_ms() - began_ms) / 1000;
  read->fire();
  over->fire();
}

namespace {

// The last save of each model. Never destroyed, as saves are not.
struct LastSaves {
  Mutex mutex;
  std::map<std::weak_ptr<runtime::Pipeline>, std::shared_ptr<Save::Work>, std::owner_less<>> saves
      ROUNDPIPE_GUARDED_BY(mutex);
};
LastSaves& last_saves() {
  static auto* instance = new LastSaves;
  return *instance;
}

std::shared_ptr<Save::Work> last_save(const Model& model) {
  const MutexLock lock(last_saves().mutex);
  const auto found = last_saves().saves.find(model.shared_pipeline());
  return found == last_saves().saves.end() ? nullptr : found->second;
}

void note_save_of(const Model& model, const std::shared_ptr<Save::Work>& work) {
  const MutexLock lock(last_saves().mutex);
  std::erase_if(last_saves().saves, [](const auto& entry) { return entry.first.expired(); });
  last_saves().saves[model.shared_pipeline()] = work;
}

// `take` takes the state of the optimizer. `is_quiet`: all of the state may be read until this returns, not longer.
Save save(const std::string& folder, Model& model, const SaveOptions& options, int64_t step, bool is_quiet,
          const std::function<void(Capture&, const std::shared_ptr<saving::SnapshotMemory>&)>& take) {
  const auto work = std::make_shared<Save::Work>();
  work->step = step;
  work->options = options;
  work->run = run_folder(folder);
  work->folder = (std::filesystem::path(work->run->path()) / checkpoint::step_name(step)).string();
  wait_for_save(model);
  work->memory = std::make_shared<saving::SnapshotMemory>(options.snapshot_memory_bytes ? *options.snapshot_memory_bytes
                                                                                        : default_memory(model));
  work->capture = std::make_unique<Capture>(model, step, options.leaves_out);
  work->capture->take_values(options.state);
  if (options.scaler != nullptr) work->capture->take_scaler(*options.scaler);
  bool writes_here = false;
  take(*work->capture, work->memory);
  if (is_quiet) {
    writes_here = !work->memory->try_take(work->capture->plain_bytes());
    if (!writes_here) work->capture->copy_plain();
  }
  note_save_of(model, work);
  note_save(*work->run, work->over);
  std::thread([work] { work->run_all(); }).detach();
  if (writes_here) {
    const double before_ms = now_ms();
    device::wait_interruptible(*work->read);
    work->memory->note_wait(now_ms() - before_ms);
  }
  work->report.caller_seconds = (now_ms() - work->began_ms) / 1000;
  Save made(work);
  if (options.wait) made.wait();
  return made;
}

}  // namespace

Save::Work& Save::work() const {
  require_not_moved_from(work_ != nullptr, "save");
  return *work_;
}

int64_t Save::step() const { return work().step; }
const std::string& Save::folder() const { return work().folder; }
bool Save::done() const { return work().over->complete(); }

SaveReport Save::wait() const {
  device::wait_interruptible(*work().over);
  if (work_->error) std::rethrow_exception(work_->error);
  SaveReport report = work_->report;
  const saving::SnapshotMemory::Report memory = work_->memory->report();
  report.longest_wait_seconds = memory.longest_wait_ms / 1000;
  report.waited_seconds = memory.total_wait_ms / 1000;
  report.held_bytes = memory.most_bytes;
  return report;
}

void wait_for_save(const Model& model) {
  if (const std::shared_ptr<Save::Work> work = last_save(model)) device::wait_interruptible(*work->over);
}

Save save_checkpoint(const std::string& folder, Model& model, Optimizer& optimizer, const SaveOptions& options) {
  require_callers_thread();
  check(options);
  if (model.fused_optimizer() != optimizer.core()) {
    throw std::invalid_argument(
        "[save_checkpoint] the optimizer was not made for this model, or another one was made since, expected the one "
        "that steps it");
  }
  if (optimizer.core()->nodes()) {
    throw std::invalid_argument(
        "[save_checkpoint] the optimizer keeps a part of its state on each of several nodes, expected one node; save "
        "and load such "
        "checkpoints with the Python package");
  }
  return save(folder, model, options, options.step.value_or(optimizer.steps()), /*is_quiet=*/false,
              [&](Capture& capture, const auto& memory) { capture.take(optimizer, memory); });
}

Save save_checkpoint(const std::string& folder, Model& model, torch::optim::Optimizer& optimizer,
                     const SaveOptions& options) {
  require_callers_thread();
  check(options);
  model.require_no_functions("save_checkpoint");
  if (model.fused_optimizer()) {
    throw std::invalid_argument(
        "[save_checkpoint] a roundpipe::Optimizer was made for this model and steps it, expected that one; its state "
        "belongs to the training");
  }
  const int64_t step = step_of(options);
  model.synchronize();
  return save(folder, model, options, step, /*is_quiet=*/true,
              [&](Capture& capture, const auto& /*memory*/) { capture.take(optimizer); });
}

Save save_checkpoint(const std::string& folder, Model& model, const SaveOptions& options) {
  require_callers_thread();
  check(options);
  model.require_no_functions("save_checkpoint");
  if (model.fused_optimizer()) {
    throw std::invalid_argument(
        "[save_checkpoint] the model has a roundpipe::Optimizer and none was given, expected it as the third argument, "
        "since its state belongs to the training");
  }
  const int64_t step = step_of(options);
  model.synchronize();
  return save(folder, model, options, step, /*is_quiet=*/true,
              [](Capture& capture, const auto& /*memory*/) { capture.take_weights(); });
}

}  // namespace roundpipe
