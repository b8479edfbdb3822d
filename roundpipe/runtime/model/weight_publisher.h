#pragma once

#include <deque>
#include <utility>
#include <vector>

#include <roundpipe/core/mutex.h>
#include <roundpipe/runtime/model/model_state.h>

namespace roundpipe::runtime {

// Publishes a general optimizer's values to the calls that follow, and shows the user the weights that calls read.
// Thread safety: the caller's thread, except finish() (the optimizer's).
class WeightPublisher {
 public:
  // `model` outlives this.
  explicit WeightPublisher(ModelState& model) : model_(model) {}

  // The host tensors that the optimizer updates, per block and parameter; a frozen parameter's entry is the user's own.
  void set_optimizer_parameters(std::vector<std::vector<at::Tensor>> parameters);
  const std::vector<std::vector<at::Tensor>>& optimizer_parameters() const { return optimizer_parameters_; }

  // Calls from now on read the optimizer's current values. Each begin() is followed by one finish() on the optimizer's
  // thread, which copies them. `in_place`: into the memory of the weights that calls have read; no call is running.
  void begin(bool in_place);
  void finish();

  // Points the user's parameters at the versions that calls read, if these are complete.
  void show_complete();
  // Waits for the versions that calls read, then shows them.
  void show();

 private:
  using Updates = std::vector<std::pair<size_t, memory::ParameterBlock::Update>>;  // with their blocks

  bool changes(size_t block) const;

  ModelState& model_;
  std::vector<std::vector<at::Tensor>> optimizer_parameters_;
  Mutex mutex_;
  // Begun and not finished, oldest first.
  std::deque<Updates> begun_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace roundpipe::runtime
