#include <roundpipe/schedule/progress.h>

namespace roundpipe::schedule {

Progress::Progress(const Plan& shape, const LayerCosts& costs, const Cluster& cluster, TimingRules rules)
    : sums_(costs, shape.first_backward_layer),
      rules_(rules),
      mode_(mode_of(shape)),
      layers_(shape.layers),
      microbatches_(static_cast<std::size_t>(shape.microbatches)),
      first_backward_layer_(shape.first_backward_layer),
      hop_ms_(cluster.hop_latency_ms),
      read_boundary_(static_cast<std::size_t>(shape.layers) + 1, 0),
      free_ms_(cluster.devices.size(), 0.0) {
  for (const ClusterDevice& device : cluster.devices) speed_.push_back(device.speed);
  for (const Job& job : shape.jobs) read_boundary_[static_cast<std::size_t>(job.layers.first)] = 1;
}

Progress::Step& Progress::step_at(int number) {
  Step& step = steps_[static_cast<std::size_t>(number % kLive)];
  if (step.number != number) {
    step.number = number;
    step.outputs_ms = 0;
    step.landed_ms.assign(static_cast<std::size_t>(layers_), 0.0);
    const std::size_t cells = (static_cast<std::size_t>(layers_) + 1) * microbatches_;
    step.value_ms.resize(cells);
    step.gradient_ms.resize(cells);
    step.value_device.resize(cells);
    step.gradient_device.resize(cells);
  }
  return step;
}

double visit_ms(Phase phase, Range layers, const CostSums& sums) {
  switch (phase) {
    case Phase::kForward:
      return sums.forward_ms(layers);
    case Phase::kFused:
      return sums.forward_ms(layers) + sums.backward_ms(layers);
    case Phase::kBackward:
      return sums.recompute_ms(layers) + sums.backward_ms(layers);
  }
  return 0;
}

double work_ms(const Plan& plan, const CostSums& sums) {
  double total = 0;
  for (const Job& job : plan.jobs) total += visit_ms(job.phase, job.layers, sums) * job.microbatches.size();
  return total;
}

}  // namespace roundpipe::schedule
