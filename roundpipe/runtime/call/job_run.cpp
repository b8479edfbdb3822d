#include <roundpipe/runtime/call/job_run.h>

#include <utility>

#include <ATen/core/grad_mode.h>

namespace roundpipe::runtime {

using schedule::Phase;

void JobRun::NewBuffers::write() const {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(values[i]);
}

void JobRun::let_go() {
  if (!keeps()) return;
  weights_read->fire();
  for (int m = job.microbatches.first; m < job.microbatches.last; ++m) {
    BoundaryValues& values = call->values(job.layers.first, m);
    if (--values.readers == 0 && !call->keep_values) values.tensors.clear();
    if (job.phase == Phase::kBackward) call->gradients(job.layers.last, m).tensors.clear();
  }
}

void JobRun::hand_on_buffers(bool keep_old) {
  for (int l = job.layers.first; keep_old && l < job.layers.last; ++l) {
    for (const memory::NamedTensor& buffer : layer(l).buffers) old_buffers[l].push_back(buffer.tensor.detach().clone());
  }
  for (const NewBuffers& buffers : std::exchange(new_buffers, {})) buffers.write();
  // A job that was skipped because the call has failed must not tell others that it has written its buffers.
  const std::exception_ptr error = call->error();
  for (const device::EventPtr& after : buffers_after) {
    if (after && !after->complete()) after->end(error);
  }
}

void JobRun::conclude() {
  hand_on_buffers(/*keep_old=*/false);
  let_go();
  loss.reset();  // it may refer to the user's model, which may go as soon as the call is over
}

bool JobRun::finish() {
  const JobCheckPtr& check = attempt->check();
  const bool over = attempt->finish([this, &check] {
    if (check) return;
    for (const NewBuffers& buffers : std::exchange(new_buffers, {})) buffers.write();
  });
  if (!over) return false;
  if (check) {
    check->over(attempt->checked_run(), shared_from_this());
  } else {
    conclude();
  }
  return true;
}

bool JobRun::give_up() {
  if (!attempt->results()->give_up()) return false;
  if (const JobCheckPtr& check = attempt->check()) {
    check->over(attempt->checked_run(), shared_from_this());
    return true;
  }
  weights_read->fire();
  let_go();
  return true;
}

std::shared_ptr<JobRun> JobRun::with(std::shared_ptr<Attempt> other) const {
  auto run = std::make_shared<JobRun>();
  run->call = call;
  run->job = job;
  run->attempt = std::move(other);
  run->position = position;
  run->last_layer = last_layer;
  run->layout = whole_layout.layers.empty() ? layout : whole_layout;
  run->buffers_before = buffers_before;
  run->weights_read = weights_read;
  run->labels = labels;
  run->era = era;
  run->number = number;
  run->uploaded = run->attempt->new_event();
  run->loss = loss;
  run->old_buffers = old_buffers;
  return run;
}

std::shared_ptr<JobRun> JobRun::again() const {
  const std::optional<int> next = attempt->results()->begin_again();
  if (!next) return nullptr;
  auto other = std::make_shared<Attempt>(call, attempt->results(), *next);
  if (attempt->check()) other->belongs_to(attempt->check(), attempt->checked_run());
  std::shared_ptr<JobRun> run = with(std::move(other));
  run->buffers_after = buffers_after;
  return run;
}

std::shared_ptr<JobRun> JobRun::to_check(const JobCheckPtr& check) const {
  auto other = std::make_shared<Attempt>(call, std::make_shared<JobResults>(), 0);
  other->belongs_to(check, check->add_run());
  std::shared_ptr<JobRun> run = with(std::move(other));
  // As many entries as the job's own run has, since layers ask for theirs by place.
  run->buffers_after.resize(buffers_after.size());
  return run;
}

}  // namespace roundpipe::runtime
