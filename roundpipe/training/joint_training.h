#pragma once

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include <roundpipe/cluster/shared_values.h>
#include <roundpipe/training/loss_counts.h>
#include <roundpipe/training/node_descriptions.h>

namespace roundpipe {

// One model that several nodes train together: what they agree on, for the model, for each optimizer and for each step.
// Collective, but for counts(). What differs between the nodes is std::invalid_argument on each of them, before
// anything was changed; a node that does not answer is Error.
// Thread safety: that of the agreement.
class JointTraining {
 public:
  JointTraining(std::shared_ptr<cluster::Agreement> agreement, ModelTraits model);

  const std::shared_ptr<LossCounts>& counts() const { return counts_; }

  // Agrees on the model, which is being wrapped; every name of every parameter and buffer.
  void agree_on_model(const cluster::NamedTensors& parameters, const cluster::NamedTensors& buffers);
  // After that, gives these the values of rank 0; see SharedValues::share.
  void share_model(const cluster::NamedTensors& named, c10d::ProcessGroup& group);

  // Agrees on an optimizer of the model.
  void agree_on_optimizer(const OptimizerTraits& optimizer, const cluster::NamedTensors& parameters);
  // After that, gives them the values of rank 0 again, as there may be new ones.
  void share_parameters(c10d::ProcessGroup& group);
  // Agrees on the model and an optimizer at once, for programs whose nodes begin from equal values: these are compared,
  // too. No `buffers`: they were compared before, and each node's own count since.
  void agree_on_start(const OptimizerTraits& optimizer, const cluster::NamedTensors& parameters,
                      const cluster::NamedTensors& buffers);

  // See LossCounts::step. `options`: of the step. `groups`: of the optimizer, the options of each. `shows_weights`:
  // whether the parameters show the weights that the step starts from.
  double step(cluster::Told options, const std::vector<cluster::Told>& groups, bool shows_weights);

 private:
  void take(const OptimizerTraits& optimizer, const cluster::NamedTensors& parameters);

  const std::shared_ptr<cluster::Agreement> agreement_;
  const ModelTraits model_;
  const std::shared_ptr<LossCounts> counts_;
  cluster::SharedValues values_;
  // Once there is an optimizer.
  cluster::NamedTensors named_;
  std::unordered_set<const c10::TensorImpl*> trained_;
};

}  // namespace roundpipe
