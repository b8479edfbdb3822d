// The part of a step that several nodes make together. Runs on the nodes' threads.

#include <algorithm>

#include <roundpipe/cluster/channel.h>
#include <roundpipe/cluster/nodes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/runtime/step/step_run.h>

namespace roundpipe::runtime {

using Link = cluster::Nodes::Link;

void StepRun::start_exchange() {
  // The weights first: if the second does not start, its thread fails all that the first one waits for.
  const auto self = shared_from_this();
  nodes_->channel(Link::kWeights).submit([self] {
    const size_t count = self->blocks_.size();
    for (size_t i = 0; i < count; ++i) self->gather(self->blocks_[self->at_once_ ? count - 1 - i : i]);
  });
  nodes_->channel(Link::kGradients).submit([self] {
    for (auto step = self->blocks_.rbegin(); step != self->blocks_.rend(); ++step) self->exchange(*step);
    if (self->looks_first()) self->agree();
  });
}

cluster::Turn StepRun::turn_of(const BlockStep& step, const char* what) const {
  return {turn_, step.number,
          concat(what, " of layer ", step.block->layers.front(), " of ", step.model->name, " in step ", turn_)};
}

void StepRun::exchange(BlockStep& step) {
  try {
    device::wait_unless_lost(*step.gradients->landed);
    const memory::GradientRoom::SharePtr share = step.gradients->share;
    // Not before: while this waits for a block that others must make room for, nothing here would make any.
    if (share) share->is_used();
    const cluster::Exchanged exchanged = cluster::exchange_gradients(
        *nodes_, turn_of(step, "the gradients"), *step.gradients, step.block->gradient_layout, *step.shards,
        static_cast<float>(gradient_factor_), *step.block->gradient_buffers);
    if (failed_nodes_.empty()) failed_nodes_ = exchanged.failed;
    step.abandoned = !failed_nodes_.empty();
    if (exchanged.sums) {
      step.gradients = exchanged.sums;
      step.gradients->share = share;
    }
    step.changes = !step.abandoned && step.gradients->flat.defined();
  } catch (...) {
    step.exchange_error = std::current_exception();
  }
  step.summed->fire();
}

void StepRun::agree() {
  try {
    device::wait_unless_lost(*measured_);
    // Known on every node.
    if (failed_nodes_.empty()) sum_squares(Link::kGradients);
  } catch (...) {
    note(std::current_exception());
  }
  decide();
}

void StepRun::sum_squares(Link link) {
  // Each sum is that of one node, and 0 on the others, so that adding them changes no bit. Before them, the number of
  // nodes that could not measure theirs.
  std::vector<double> all{error_ ? 1.0 : 0.0};
  for (BlockStep& step : blocks_) {
    step.squares.resize(step.optimizer->terms());
    all.insert(all.end(), step.squares.begin(), step.squares.end());
  }
  const at::Tensor sums = at::from_blob(all.data(), {static_cast<int64_t>(all.size())}, at::kDouble);
  nodes_->sum(link, sums, concat("the norm of the gradients in step ", turn_));
  if (all.front() > 0) throw Error(concat("[cluster] another node could not measure its gradients in step ", turn_));
  auto next = all.begin() + 1;
  for (BlockStep& step : blocks_) {
    std::copy_n(next, step.squares.size(), step.squares.begin());
    next += static_cast<std::ptrdiff_t>(step.squares.size());
  }
}

void StepRun::gather(BlockStep& step) {
  std::exception_ptr error;
  try {
    for (const device::EventPtr& event : {step.summed, decided_, step.made}) device::wait_unless_lost(*event);
    error = step.made->error();
    // The same on every node, whatever went wrong on this one.
    if (step.changes && !is_left_out(step)) {
      cluster::gather_weights(*nodes_, turn_of(step, "the weights"), error ? at::Tensor() : step.after->flat,
                              *step.shards, /*fills=*/step.emulated_ms == 0);
    }
  } catch (...) {
    if (!error) error = std::current_exception();
  }
  if (error) {
    note(error);
    step.after->published->fail(error);
  } else {
    step.after->published->fire();
  }
  if (to_update_ == 1) end_gathering();
  finish(step);
}

void StepRun::end_gathering() {
  note_failed_nodes();
  if (!measures_late() || !failed_nodes_.empty()) return;
  try {
    sum_squares(Link::kWeights);
  } catch (...) {
    note(std::current_exception());
  }
}

void StepRun::note_failed_nodes() {
  std::string ranks;
  for (const int rank : failed_nodes_) {
    if (rank == nodes_->rank()) return;  // its own error is told where it arose
    ranks += concat(ranks.empty() ? "" : ", ", rank);
  }
  if (ranks.empty()) return;
  note(std::make_exception_ptr(Error(concat("[cluster] the batch of rank ", ranks, " failed before step ", turn_,
                                            ", so the step has left ", updated_ > 0 ? "some" : "all",
                                            " weights as they were on every node; the error on that rank says why"))));
}

}  // namespace roundpipe::runtime
