#include <roundpipe/runtime/call/job_run.h>

#include <ATen/core/grad_mode.h>

namespace roundpipe::runtime {

using schedule::Phase;

void JobRun::NewBuffers::write() const {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(values[i]);
}

void JobRun::let_go() {
  if (!call->options.fault_tolerant) return;
  weights_read->fire();
  for (int m = job.microbatches.first; m < job.microbatches.last; ++m) {
    BoundaryValues& values = call->values(job.layers.first, m);
    if (--values.readers == 0 && !call->keep_values) values.tensors.clear();
    if (job.phase == Phase::kBackward) call->gradients(job.layers.last, m).tensors.clear();
  }
}

bool JobRun::finish() {
  const bool over = attempt->finish([this] {
    for (const NewBuffers& buffers : new_buffers) buffers.write();
  });
  if (!over) return false;
  // A job that was skipped because the call has failed must not tell others that it has written its buffers.
  const std::exception_ptr error = call->error();
  for (const device::EventPtr& after : buffers_after) {
    if (!after || after->complete()) continue;
    if (error) {
      after->fail(error);
    } else {
      after->fire();
    }
  }
  let_go();
  return true;
}

bool JobRun::give_up() {
  if (!attempt->results()->give_up()) return false;
  weights_read->fire();
  let_go();
  return true;
}

std::shared_ptr<JobRun> JobRun::again() const {
  const std::optional<int> next = attempt->results()->begin_again();
  if (!next) return nullptr;
  auto run = std::make_shared<JobRun>();
  run->call = call;
  run->job = job;
  run->attempt = std::make_shared<Attempt>(call, attempt->results(), *next);
  run->position = position;
  run->last_layer = last_layer;
  run->layout = layout;
  run->buffers_before = buffers_before;
  run->buffers_after = buffers_after;
  run->weights_read = weights_read;
  run->labels = labels;
  run->era = era;
  run->number = number;
  run->uploaded = run->attempt->new_event();
  run->loss = loss;
  return run;
}

}  // namespace roundpipe::runtime
