#include <roundpipe/training/joint_training.h>

#include <roundpipe/core/error.h>

namespace roundpipe {

using cluster::NamedTensors;
using cluster::SharedValues;
using cluster::Told;

namespace {

constexpr const char* kWraps = "wraps";
constexpr const char* kMakesOptimizer = "makes an optimizer for";
constexpr const char* kSameOptimizer = "the same parameters and optimizer on every rank";

Told operator+(Told told, const Told& more) {
  told.insert(told.end(), more.begin(), more.end());
  return told;
}

}  // namespace

JointTraining::JointTraining(std::shared_ptr<cluster::Agreement> agreement, ModelTraits model)
    : agreement_(std::move(agreement)),
      model_(std::move(model)),
      counts_(std::make_shared<LossCounts>(agreement_)),
      values_(agreement_) {}

void JointTraining::agree_on_model(const NamedTensors& parameters, const NamedTensors& buffers) {
  agreement_->agree(kWraps, describe(model_, parameters, buffers), "the same program on every rank");
}

void JointTraining::share_model(const NamedTensors& named, c10d::ProcessGroup& group) {
  values_.share(kWraps, named, group);
}

void JointTraining::agree_on_optimizer(const OptimizerTraits& optimizer, const NamedTensors& parameters) {
  agreement_->agree(kMakesOptimizer, describe(model_, parameters, {}) + describe(optimizer, parameters),
                    kSameOptimizer);
  take(optimizer, parameters);
}

void JointTraining::share_parameters(c10d::ProcessGroup& group) { values_.share(kMakesOptimizer, named_, group); }

void JointTraining::agree_on_start(const OptimizerTraits& optimizer, const NamedTensors& parameters,
                                   const NamedTensors& buffers) {
  NamedTensors all = parameters;
  all.insert(all.end(), buffers.begin(), buffers.end());
  agreement_->agree(kMakesOptimizer,
                    describe(model_, parameters, buffers) + describe(optimizer, parameters) +
                        SharedValues::checksums("the values of ", all),
                    kSameOptimizer);
  take(optimizer, parameters);
  values_.note_alike(parameters);
}

void JointTraining::take(const OptimizerTraits& optimizer, const NamedTensors& parameters) {
  named_ = parameters;
  trained_.clear();
  for (const std::vector<at::Tensor>& group : optimizer.parameters) {
    for (const at::Tensor& parameter : group) trained_.insert(parameter.unsafeGetTensorImpl());
  }
}

double JointTraining::step(Told options, const std::vector<Told>& groups, bool shows_weights) {
  std::string frozen;
  for (const auto& [name, parameter] : named_) {
    if (!parameter.requires_grad() && trained_.contains(parameter.unsafeGetTensorImpl()))
      frozen += concat(frozen.empty() ? "" : ", ", name);
  }
  if (!frozen.empty()) options.emplace_back("frozen since the optimizer was made", frozen);
  const NamedTensors written = shows_weights ? values_.written(named_) : NamedTensors();
  const double factor =
      counts_->step(options + SharedValues::checksums("what was written to ", written) + describe_groups(groups));
  values_.note_alike(written);
  return factor;
}

}  // namespace roundpipe
