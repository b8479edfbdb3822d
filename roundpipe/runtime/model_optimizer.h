#pragma once

#include <deque>
#include <memory>
#include <vector>

#include <roundpipe/optim/block_optimizer.h>
#include <roundpipe/runtime/pipeline.h>
#include <roundpipe/runtime/step_run.h>

namespace roundpipe::runtime {

// The fused optimizer of one or more models, which makes the next version of each block's weights in place of the
// block's gradients.
//
// Thread safety: the caller's thread, as the pipelines; updates are made on the update thread.
class ModelOptimizer {
 public:
  // `groups`: for each pipeline, block and parameter the group that it belongs to, -1 where it is not trained.
  // Throws std::invalid_argument for a parameter that cannot be trained so.
  ModelOptimizer(std::vector<std::shared_ptr<Pipeline>> pipelines,
                 const std::vector<std::vector<std::vector<int>>>& groups, optim::Algorithm algorithm,
                 optim::MomentFormat format);

  // Starts a step with the gradients summed since the last one; `groups` are the hyperparameters of each group. At most
  // two steps are under way, so it may wait for the one before the last. Throws what made an earlier step or call fail;
  // then no step has been started.
  std::shared_ptr<StepRun> step(std::vector<optim::Hyperparameters> groups, const StepOptions& options);

  // Waits for all steps and lets calls read the newest weights. Throws what made a step fail.
  void finish();

  // Of parameter `index` of `block` of pipeline `pipeline`. REQUIRES: no step is under way.
  optim::BlockOptimizer& block(size_t pipeline, size_t block) { return *blocks_->optimizers[pipeline][block]; }
  // State was loaded, or weights with their masters: later writes by the user count from now.
  void accept_weights();

  struct HostBytes {
    int64_t parameters = 0;  // trained ones, a number
    int64_t weights_and_gradients = 0;
    int64_t rests = 0;
    int64_t moments = 0;
  };
  HostBytes host_bytes(const std::vector<optim::Hyperparameters>& groups) const;

 private:
  // What steps need, and keep alive.
  struct Blocks {
    std::vector<std::shared_ptr<ModelState>> models;
    std::vector<std::vector<std::unique_ptr<optim::BlockOptimizer>>> optimizers;
  };
  std::vector<size_t> written(size_t pipeline, size_t block);
  void reap(size_t at_most);

  const std::vector<std::shared_ptr<Pipeline>> pipelines_;
  const std::shared_ptr<Blocks> blocks_;
  std::vector<std::vector<std::vector<uint32_t>>> seen_;  // versions of the user's parameters, as last looked at
  std::deque<std::shared_ptr<StepRun>> runs_;             // oldest first
};

}  // namespace roundpipe::runtime
