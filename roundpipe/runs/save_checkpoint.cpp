#include <roundpipe/runs/save_checkpoint.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <stdexcept>

#include <torch/version.h>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/files/json_text.h>
#include <roundpipe/files/manifest.h>
#include <roundpipe/runs/capture.h>
#include <roundpipe/runs/model_parts.h>
#include <roundpipe/runs/save_work.h>
#include <roundpipe/runs/torch_optimizer.h>
#include <roundpipe/training/model_core.h>

namespace roundpipe {

namespace {

// Throws std::invalid_argument for names of files that a checkpoint has itself.
void check_files(const SaveOptions& options) {
  for (const auto& [name, text] : options.files) {
    if (files::is_file_name(name) && name != kStateFile && name != kIndexFile && !name.ends_with(".safetensors"))
      continue;
    throw std::invalid_argument(concat("[save_checkpoint] '", files::shown(name),
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

// A scaler's state, as torch's has it, and how it goes on.
std::function<StateValue()> later_state(const GradScaler& scaler) {
  return [later = scaler.later_state(), options = scaler.options()] {
    const GradScaler::State scale = later();
    const StateValue state = StateValue::dict({{"scale", scale.scale},
                                               {"growth_factor", options.growth_factor},
                                               {"backoff_factor", options.backoff_factor},
                                               {"growth_interval", options.growth_interval},
                                               {"_growth_tracker", scale.growth_tracker}});
    const StateValue resume = StateValue::dict({{"front", scale.front}, {"updates_on_main", false}});
    return StateValue::dict({{"state", state}, {"resume", resume}});
  };
}

// What is saved beside the options; `fused` or, if it may be, `torch`, or none of them.
struct Saved {
  Optimizer* fused = nullptr;
  torch::optim::Optimizer* torch = nullptr;
  int64_t step = 0;
};

// Throws std::invalid_argument unless libtorch's optimizer steps parameters of the model, or all of its copies.
void require_parameters(const TrainedOptimizer& optimizer, const ModelNames& names, const CopySteps* copies) {
  std::set<const c10::TensorImpl*> own;
  for (const auto& [name, parameter] : names.parameters) {
    const at::Tensor stepped = copies == nullptr ? parameter : copies->copy_of(parameter);
    if (stepped.defined()) own.insert(stepped.unsafeGetTensorImpl());
  }
  for (const TrainedOptimizer::Group& group : optimizer.groups) {
    for (const at::Tensor& parameter : group.parameters) {
      if (own.contains(parameter.unsafeGetTensorImpl())) continue;
      throw std::invalid_argument(
          concat("[save_checkpoint] the optimizer steps a tensor that is no parameter of the "
                 "model, expected ",
                 copies == nullptr ? "the model's own" : "its optimizer_parameters()",
                 "; save other tensors as SaveOptions::state"));
    }
  }
}

std::shared_ptr<Capture> capture_of(const ModelGroup& group, const SaveOptions& options, const Saved& saved,
                                    const std::shared_ptr<saving::SnapshotMemory>& memory) {
  const ModelNames names = names_of(group, options.leaves_out);
  const std::vector<TrainedModel> models = parts_of(group);
  CapturedRun run{.step = saved.step,
                  .steps = saved.fused == nullptr ? saved.step : saved.fused->steps(),
                  .versions = {{"roundpipe", ROUNDPIPE_VERSION}, {"torch", TORCH_VERSION}}};
  auto capture = std::make_shared<Capture>(names, models, std::move(run));
  capture->contents()->files = options.files;
  if (saved.fused != nullptr) capture->take_schedulers(schedules_of(*saved.fused));
  std::vector<std::pair<std::string, GivenValue>> values;
  for (const auto& [name, value] : options.state) values.emplace_back(name, GivenValue{value});
  capture->take_values(values);
  if (options.scaler != nullptr) capture->take_scaler(later_state(*options.scaler));
  if (saved.fused != nullptr) {
    capture->take(fused_of(*saved.fused), parts_of(*saved.fused, names), memory);
    return capture;
  }
  CopySteps* const copies = group.models.at(0).second->copy_steps().get();
  if (saved.torch == nullptr) {
    capture->take(models, copies, nullptr, {});
    return capture;
  }
  const TrainedOptimizer optimizer = parts_of(*saved.torch, "save_checkpoint");
  require_parameters(optimizer, names, copies);
  capture->take(models, copies, &optimizer, state_of(*saved.torch));
  return capture;
}

Save save(const std::string& folder, const ModelGroup& group, const SaveOptions& options, const Saved& saved) {
  const double began_ms = now_ms();
  SaveWork::Settings settings{.step = saved.step,
                              .run = run_folder(folder, tell_user),
                              .overwrite = options.overwrite,
                              .keep_last = options.keep_last,
                              .keep_every = options.keep_every,
                              .tell = tell_user};
  settings.path = settings.run->path();
  if (!options.wait) settings.text_of = text_of;
  for (const auto& [path, model] : group.models) wait_for_save(*model);
  const auto memory = std::make_shared<saving::SnapshotMemory>(
      options.snapshot_memory_bytes ? *options.snapshot_memory_bytes
                                    : default_snapshot_bytes(pipelines_of(group), host_budget(cores_of(group))));
  const std::shared_ptr<Capture> capture = capture_of(group, options, saved, memory);
  // What no snapshot stands at may be read until this returns, not longer.
  const bool is_plain = saved.fused == nullptr;
  const bool writes_here = is_plain && !memory->try_take(capture->contents()->plain_bytes());
  if (is_plain && !writes_here) capture->contents()->copy_plain();
  const auto work = std::make_shared<SaveWork>(std::move(settings), capture->contents(), memory);
  for (const auto& [path, model] : group.models) note_save_of(*model, work);
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

// Waits for all work but an asynchronous step's weights, which calls do not read yet.
void finish_work(Model& model) {
  if (const std::shared_ptr<CopySteps>& copies = model.copy_steps()) return copies->finish_update();
  model.synchronize();
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
  return save_checkpoint(folder, group_of(model), optimizer, options);
}

Save save_checkpoint(const std::string& folder, const ModelGroup& group, Optimizer& optimizer,
                     const SaveOptions& options) {
  require_callers_thread();
  check(options);
  require_whole_optimizer("save_checkpoint", group, optimizer);
  return save(folder, group, options, {.fused = &optimizer, .step = options.step.value_or(optimizer.steps())});
}

Save save_checkpoint(const std::string& folder, Model& model, torch::optim::Optimizer& optimizer,
                     const SaveOptions& options) {
  require_callers_thread();
  check(options);
  if (model.fused_optimizer()) {
    throw std::invalid_argument(
        "[save_checkpoint] a roundpipe::Optimizer was made for this model and steps it, expected that one; its state "
        "belongs to the training");
  }
  const int64_t step = step_of(options);
  finish_work(model);
  return save(folder, group_of(model), options, {.torch = &optimizer, .step = step});
}

Save save_checkpoint(const std::string& folder, Model& model, const SaveOptions& options) {
  require_callers_thread();
  check(options);
  if (model.fused_optimizer()) {
    throw std::invalid_argument(
        "[save_checkpoint] the model has a roundpipe::Optimizer and none was given, expected it as the third argument, "
        "since its state belongs to the training");
  }
  const int64_t step = step_of(options);
  finish_work(model);
  return save(folder, group_of(model), options, {.step = step});
}

}  // namespace roundpipe
