#include <roundpipe/runs/save_checkpoint.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include <roundpipe/checkpoint/json_text.h>
#include <roundpipe/checkpoint/manifest.h>
#include <roundpipe/core/clock.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/runs/capture.h>
#include <roundpipe/runs/save_work.h>
#include <roundpipe/training/model_core.h>

namespace roundpipe {

namespace {

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
  check_save(options.step.value_or(0), options.keep_last, options.keep_every);
  if (options.snapshot_memory_bytes.value_or(0) < 0) {
    throw std::invalid_argument(
        concat("[save_checkpoint] snapshot_memory_bytes is ", *options.snapshot_memory_bytes, ", expected at least 0"));
  }
  check_files(options);
}

int64_t step_of(const SaveOptions& options) {
  if (options.step) return *options.step;
  throw std::invalid_argument(
      "[save_checkpoint] the step's number is not known without a roundpipe::Optimizer, expected SaveOptions::step");
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& told) {
    return told.what();
  } catch (...) {
    return "[save_checkpoint] the save has failed";
  }
}

// The last save of each model. Never destroyed, as saves are not.
struct LastSaves {
  Mutex mutex;
  std::map<std::weak_ptr<runtime::Pipeline>, std::shared_ptr<SaveWork>, std::owner_less<>> saves
      ROUNDPIPE_GUARDED_BY(mutex);
};
LastSaves& last_saves() {
  static auto* instance = new LastSaves;
  return *instance;
}

std::shared_ptr<SaveWork> last_save(const Model& model) {
  const MutexLock lock(last_saves().mutex);
  const auto found = last_saves().saves.find(model.shared_pipeline());
  return found == last_saves().saves.end() ? nullptr : found->second;
}

void note_save_of(const Model& model, const std::shared_ptr<SaveWork>& work) {
  const MutexLock lock(last_saves().mutex);
  std::erase_if(last_saves().saves, [](const auto& entry) { return entry.first.expired(); });
  last_saves().saves[model.shared_pipeline()] = work;
}

// `take` takes the state of the optimizer. `is_quiet`: all of the state may be read until this returns, not longer.
Save save(const std::string& folder, Model& model, const SaveOptions& options, int64_t step, bool is_quiet,
          const std::function<void(Capture&, const std::shared_ptr<saving::SnapshotMemory>&)>& take) {
  const double began_ms = now_ms();
  SaveWork::Settings settings{.step = step,
                              .run = run_folder(folder, tell_user),
                              .overwrite = options.overwrite,
                              .keep_last = options.keep_last,
                              .keep_every = options.keep_every,
                              .tell = tell_user};
  settings.path = settings.run->path();
  if (!options.wait) settings.text_of = text_of;
  wait_for_save(model);
  const auto memory = std::make_shared<saving::SnapshotMemory>(
      options.snapshot_memory_bytes
          ? *options.snapshot_memory_bytes
          : default_snapshot_bytes({model.shared_pipeline()}, model.core().memory().budget().host_bytes));
  const auto capture = std::make_shared<Capture>(model, step, options.leaves_out);
  capture->contents()->files = options.files;
  capture->take_values(options.state);
  if (options.scaler != nullptr) capture->take_scaler(*options.scaler);
  take(*capture, memory);
  const bool writes_here = is_quiet && !memory->try_take(capture->contents()->plain_bytes());
  if (is_quiet && !writes_here) capture->contents()->copy_plain();
  const auto work = std::make_shared<SaveWork>(std::move(settings), capture->contents(), memory);
  note_save_of(model, work);
  note_save(work->path(), work->over());
  // Registered after the engine's own exit handler, so that it runs before that.
  [[maybe_unused]] static const int registered = std::atexit([] {
    try {
      wait_for_all_saves();
    } catch (...) {  // the user does not want to wait
    }
  });
  work->start([capture] { capture->finish(); }, began_ms);
  if (writes_here) work->wait_read();
  work->note_caller_seconds((now_ms() - began_ms) / 1000);
  Save made(work);
  if (options.wait) made.wait();
  return made;
}

}  // namespace

SaveWork& Save::work() const {
  require_not_moved_from(work_ != nullptr, "save");
  return *work_;
}

int64_t Save::step() const { return work().step(); }
const std::string& Save::folder() const { return work().folder(); }
bool Save::done() const { return work().done(); }
SaveReport Save::wait() const { return work().wait(); }

void wait_for_save(const Model& model) {
  if (const std::shared_ptr<SaveWork> work = last_save(model)) work->wait_over();
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
