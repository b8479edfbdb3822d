#include <roundpipe/runtime/worker/backward_clock.h>

#include <roundpipe/runtime/call/job_run.h>

namespace roundpipe::runtime {

void BackwardClock::reached(int layer) {
  device::EventPtr& event = reached_[static_cast<size_t>(layer - layers_.first)];
  if (!event) event = queue_.mark();
}

void BackwardClock::over(const JobRun& run) {
  const device::EventPtr end = queue_.mark();
  std::vector<device::EventPtr> events = reached_;
  events.push_back(end);
  run.attempt->then(events, [log = run.call->log, device = run.job.device, layers = layers_, reached = reached_, end] {
    double end_ms = end->time_ms();
    for (int l = layers.first; l < layers.last; ++l) {
      const device::EventPtr& begin = reached[static_cast<size_t>(l - layers.first)];
      if (!begin) continue;
      const double begin_ms = begin->time_ms();
      if (end_ms > begin_ms) log->add(LayerTime{l, device, /*backward=*/true, end_ms - begin_ms});
      end_ms = begin_ms;
    }
  });
}

}  // namespace roundpipe::runtime
