#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <roundpipe/api/model_group.h>
#include <roundpipe/runs/run_folders.h>
#include <roundpipe/saving/state_value.h>

namespace roundpipe {

struct SaveOptions {
  // The checkpoint's number. Unset: the number of steps of a fused optimizer; must be set without one.
  std::optional<int64_t> step = std::nullopt;
  // The scaler of the losses.
  const GradScaler* scaler = nullptr;
  // More to save, by name, such as the position in the data. Copied.
  std::vector<std::pair<std::string, StateValue>> state = {};
  // Small files to put beside the weights, by name: config.json makes the folder one that transformers loads, if the
  // layers have its names.
  std::map<std::string, std::string> files = {};
  // Frozen parameters that another folder holds, such as the base under adapters; a load compares samples of their
  // values. Parameters in mapped files are left out in any case.
  std::function<bool(const std::string& name, const at::Tensor& parameter)> leaves_out = {};
  // Remove older complete checkpoints than this many when the new one is complete; unset: keep all. Of these, keep
  // those whose step is a multiple of `keep_every`.
  std::optional<int64_t> keep_last = std::nullopt;
  int64_t keep_every = 0;
  // How much the save may hold beside the state. Unset: what ModelOptions::host_memory leaves or, without it, half of
  // the free memory; at least two blocks.
  std::optional<int64_t> snapshot_memory_bytes = std::nullopt;
  // A checkpoint of this step may be there, and is replaced.
  bool overwrite = false;
  // Return when the checkpoint is complete, and throw its errors.
  bool wait = false;
};

class SaveWork;

// A checkpoint that is being written. It goes on when this is dropped, and the process ends after it.
// Of a save that was moved from, every function but assignment throws std::invalid_argument.
// Thread safety: any thread.
class Save {
 public:
  int64_t step() const;
  // Where it will be.
  const std::string& folder() const;
  // Whether the checkpoint is complete, or has failed.
  bool done() const;
  // Waits until the checkpoint is complete. Throws Error if it could not be written, or what the steps threw that it
  // was to hold. Nothing of it is there then, and earlier checkpoints are as they were; unless only the disk's last
  // sync failed, which the Error says. An older checkpoint that cannot be removed is told, and is no error.
  SaveReport wait() const;

  explicit Save(std::shared_ptr<SaveWork> work) : work_(std::move(work)) {}

 private:
  SaveWork& work() const;

  std::shared_ptr<SaveWork> work_;  // null: moved from
};

// Saves the complete state of a training as `folder`/step-N, while the training goes on: weights as safetensors, the
// optimizer's state, gradients that no step has consumed, counters, random states. Call it after the step. A training
// that loads the checkpoint continues with the same bits, in Python as well; docs/checkpoints.md,
// docs/reference/checkpoint-format.md.
//
// With an Optimizer, nothing waits for the step under way. A block that is not written yet when the next step updates
// it is copied first, within the memory for that; when that is used up, updates wait for the disk. With an optimizer of
// libtorch (Adam, AdamW, SGD, Adagrad, RMSprop), over the model's parameters or its optimizer_parameters(), all work is
// waited for; a state that does not fit into that memory is written before the call returns. An earlier save of the
// model that is under way is waited for.
//
// If a save fails and nobody waits for it, the user is told and training goes on.
// Throws std::invalid_argument for an option, an optimizer or a value that does not fit, with nothing written; Error if
// another process writes to the folder, or it cannot be written to. The caller's thread.
Save save_checkpoint(const std::string& folder, Model& model, Optimizer& optimizer, const SaveOptions& options = {});
// Of an optimizer that was made for the group: one checkpoint of the whole, as Python's of an AutoRoundPipe.
Save save_checkpoint(const std::string& folder, const ModelGroup& group, Optimizer& optimizer,
                     const SaveOptions& options = {});
Save save_checkpoint(const std::string& folder, Model& model, torch::optim::Optimizer& optimizer,
                     const SaveOptions& options);
// Of a model that nothing has trained.
Save save_checkpoint(const std::string& folder, Model& model, const SaveOptions& options);

// Waits until no save of the model reads its state.
void wait_for_save(const Model& model);

}  // namespace roundpipe
