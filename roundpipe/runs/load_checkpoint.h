#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <roundpipe/api/model_group.h>
#include <roundpipe/saving/state_value.h>

namespace roundpipe {

struct LoadOptions {
  // As at the save.
  GradScaler* scaler = nullptr;
  // Throw if the checkpoint lacks parameters or buffers of the model, or has others.
  bool strict = true;
};

// What was loaded.
struct Loaded {
  int64_t step = 0;
  std::string folder;  // of the checkpoint
  // The program's own values, by name, from Python as well.
  std::vector<std::pair<std::string, StateValue>> state = {};
  // Parameters and buffers that the checkpoint, or the model, lacks; only with strict = false.
  std::vector<std::string> missing = {};
  std::vector<std::string> unexpected = {};

  // A value of the program's own. Throws std::invalid_argument if there is none of this name.
  const StateValue& value(const std::string& name) const;
};

// Loads what save_checkpoint has saved, in C++ or Python, so that the training continues with the same bits.
//
// Make model, optimizer and scaler as at the start of the training, then load. `folder` is a checkpoint, or a run's
// folder: then its newest checkpoint is loaded; if that one is damaged in any way, the one before is, and the user is
// told which file was wrong and how many steps are lost. Devices, plans and the weights' dtype may be others than at
// the save. The number of microbatches is the checkpoint's, since it belongs to the bits; the user is told if it
// differs. Files are read once, straight into the model, and verified. A save into the folder that this process has
// under way is waited for.
//
// Throws std::invalid_argument for a checkpoint of another model or optimizer, with nothing changed; Error if there is
// no checkpoint that is whole; and first whatever earlier work of the model threw, which is no damage. Damage of a
// large file is found when it has been read: do not use the model then. The caller's thread.
Loaded load_checkpoint(const std::string& folder, Model& model, Optimizer& optimizer, const LoadOptions& options = {});
// Of an optimizer that was made for the group.
Loaded load_checkpoint(const std::string& folder, const ModelGroup& group, Optimizer& optimizer,
                       const LoadOptions& options = {});
Loaded load_checkpoint(const std::string& folder, Model& model, torch::optim::Optimizer& optimizer,
                       const LoadOptions& options = {});
// Of a model that was saved without an optimizer.
Loaded load_checkpoint(const std::string& folder, Model& model, const LoadOptions& options = {});
// Loads weights and buffers and nothing else, from which a new training starts.
Loaded load_weights(const std::string& folder, Model& model, bool strict = true);
Loaded load_weights(const std::string& folder, const ModelGroup& group, bool strict = true);

}  // namespace roundpipe
