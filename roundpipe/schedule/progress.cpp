#include <roundpipe/schedule/progress.h>

#include <roundpipe/schedule/moved_bytes.h>

namespace roundpipe::schedule {

namespace {

TimingRules with_links(TimingRules rules, const Cluster& cluster) {
  rules.hop_on_same_device |= has_rates(cluster);
  return rules;
}

// Of one link, which has its share of the host's bandwidth; 0 = at once.
double ms_per_byte(double link_gb_per_s, const Cluster& cluster) {
  constexpr double kBytesPerMs = 1e6;  // of 1 GB/s
  const double share = cluster.host_gb_per_s / static_cast<double>(cluster.devices.size());
  const double slower = std::max(link_gb_per_s > 0 ? 1 / link_gb_per_s : 0, share > 0 ? 1 / share : 0);
  return slower / kBytesPerMs;
}

}  // namespace

Progress::Progress(const Plan& shape, const LayerCosts& costs, const Cluster& cluster, TimingRules rules)
    : sums_(costs, shape.first_backward_layer),
      kept_(costs, cluster),
      rules_(with_links(rules, cluster)),
      mode_(mode_of(shape)),
      layers_(shape.layers),
      microbatches_(static_cast<std::size_t>(shape.microbatches)),
      first_backward_layer_(shape.first_backward_layer),
      hop_ms_(std::max(cluster.hop_latency_ms, schedule::hop_ms(costs, cluster))),
      up_ms_per_byte_(ms_per_byte(cluster.link_up_gb_per_s, cluster)),
      down_ms_per_byte_(ms_per_byte(cluster.link_down_gb_per_s, cluster)),
      read_boundary_(static_cast<std::size_t>(shape.layers) + 1, 0),
      free_ms_(cluster.devices.size(), 0.0),
      links_(cluster.devices.size()) {
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
