#pragma once

#include <deque>
#include <memory>
#include <vector>

#include <roundpipe/optim/block_optimizer.h>
#include <roundpipe/runtime/pipeline.h>
#include <roundpipe/runtime/step/step_run.h>

namespace roundpipe::runtime {

// The fused optimizer of one or more models, which makes the next version of each block's weights in place of the
// block's gradients.
//
// Thread safety: the caller's thread, as the pipelines; updates are made on the update thread.
class ModelOptimizer {
 public:
  // `groups`: for each pipeline, block and parameter the group that it belongs to, -1 where it is not trained.
  // Throws std::invalid_argument for a parameter that cannot be trained so, and for settings of the environment that
  // updates cannot be made with; nothing has been changed then.
  ModelOptimizer(std::vector<std::shared_ptr<Pipeline>> pipelines,
                 const std::vector<std::vector<std::vector<int>>>& groups, optim::Algorithm algorithm,
                 optim::MomentFormat format);

  // Starts a step with the gradients summed since the last one; `groups` are the hyperparameters of each group. At most
  // two steps are under way, so without make_room() it may wait. Throws what made an earlier step or call fail; then no
  // step has been started.
  std::shared_ptr<StepRun> step(std::vector<optim::Hyperparameters> groups, const StepOptions& options);

  // Waits for all steps and lets calls read the newest weights. Throws what made a step fail.
  void finish();

  // Waits until a step can be started without waiting for another. Throws what made an earlier step fail.
  void make_room();

  // Block `index`, counted over all pipelines. REQUIRES: no step is under way.
  optim::BlockOptimizer& block(size_t index) { return blocks_->at(index)->optimizer; }
  // The user has not written into the weights since the masters were made: both have been loaded, for example.
  void accept_weights();

  struct HostBytes {
    int64_t parameters = 0;  // trained ones, a number
    int64_t weights_and_gradients = 0;
    int64_t rests = 0;
    int64_t moments = 0;
  };
  HostBytes host_bytes(const std::vector<optim::Hyperparameters>& groups) const;

 private:
  // One block of one pipeline's model. Steps need it, and keep it alive.
  struct BoundBlock {
    BoundBlock(std::shared_ptr<ModelState> of, size_t index, size_t layers_before, std::vector<int> groups,
               optim::Algorithm algorithm, optim::MomentFormat format);

    // Parameters that the user has written into since `seen` was taken.
    std::vector<size_t> written() const;
    void see();

    const std::shared_ptr<ModelState> model;
    BlockState& state;
    const size_t index;  // in the model
    const size_t layer;  // its first, counted over all models
    const double emulated_ms;
    optim::BlockOptimizer optimizer;
    std::vector<uint32_t> seen;  // versions of the user's parameters, as last looked at; caller's thread only
  };
  using Blocks = std::vector<std::unique_ptr<BoundBlock>>;
  void reap(size_t at_most);

  const std::vector<std::shared_ptr<Pipeline>> pipelines_;
  const std::shared_ptr<Blocks> blocks_;
  std::deque<std::shared_ptr<StepRun>> runs_;  // oldest first
};

}  // namespace roundpipe::runtime
