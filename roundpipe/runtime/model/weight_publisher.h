#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <roundpipe/runtime/model/model_state.h>

namespace roundpipe::runtime {

// An update of a model's blocks by a general optimizer, whose values are still to be copied. Begun on the caller's
// thread, made once on the optimizer's; if it is dropped before, calls that read the new weights fail.
class WeightUpdate {
 public:
  // `parameters`: the optimizer's, per block. `blocks`: the begun updates, with their blocks' indices.
  using Blocks = std::vector<std::pair<size_t, memory::ParameterBlock::Update>>;
  WeightUpdate(std::shared_ptr<ModelState> model, std::vector<std::vector<at::Tensor>> parameters, Blocks blocks);
  ~WeightUpdate();
  WeightUpdate(const WeightUpdate&) = delete;
  WeightUpdate& operator=(const WeightUpdate&) = delete;

  // Copies the optimizer's current values into the new versions and publishes them. Waits for uploads from the memory
  // that is overwritten.
  void make();

 private:
  const std::shared_ptr<ModelState> model_;
  const std::vector<std::vector<at::Tensor>> parameters_;
  Blocks blocks_;
};

// Begins a general optimizer's updates, and shows the user the weights that calls read.
// Thread safety: the caller's thread.
class WeightPublisher {
 public:
  explicit WeightPublisher(std::shared_ptr<ModelState> model) : model_(std::move(model)) {}

  // The host tensors that the optimizer updates, per block and parameter; a frozen parameter's entry is the user's own.
  void set_optimizer_parameters(std::vector<std::vector<at::Tensor>> parameters);
  const std::vector<std::vector<at::Tensor>>& optimizer_parameters() const { return optimizer_parameters_; }

  // Calls from now on read the values that the optimizer has when the update is made. An update is begun after the one
  // before has been made. `in_place`: into the memory of the weights that calls have read; no call is running.
  std::unique_ptr<WeightUpdate> begin_update(bool in_place);

  // The weights that a call would read if it were made now, by block and parameter: views. Waits for them.
  std::vector<std::vector<at::Tensor>> read_by_calls() const;
  // See ParameterBlock::adopt_replaced, of every block.
  void adopt_replaced();
  // Points the user's parameters at the versions that calls read, if these are complete.
  void show_complete();
  // Waits for the versions that calls read, then shows them.
  void show();
  // Waits for the newest versions, then shows them, if they are not shown; calls read what they would have read.
  // Returns false, having done nothing, on a thread of the engine, which the new weights may wait for.
  bool show_newest();

 private:
  bool changes(size_t block) const;

  const std::shared_ptr<ModelState> model_;
  std::vector<std::vector<at::Tensor>> optimizer_parameters_;
};

}  // namespace roundpipe::runtime
