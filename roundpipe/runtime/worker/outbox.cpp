#include <roundpipe/runtime/worker/outbox.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/strides.h>

#include <roundpipe/core/error.h>
#include <roundpipe/memory/host_arena.h>

namespace roundpipe::runtime {

using device::EventPtr;
using memory::HostValue;
using memory::HostValuePtr;
using transfer::Piece;
using transfer::Priority;

namespace {

// Marks the losses in `sent_`, which otherwise holds numbers of boundaries.
constexpr int kLosses = -1;

}  // namespace

void Outbox::begin_microbatch(bool again) {
  if (again) return;
  sent_.clear();
  losses_.clear();
}

bool Outbox::sent_before(int what) {
  if (std::find(sent_.begin(), sent_.end(), what) != sent_.end()) return true;
  sent_.push_back(what);
  return false;
}

void Outbox::send(JobRun& run, Priority priority, std::function<std::vector<Piece>()> begin, EventPtr done,
                  const EventPtr& room) {
  EventPtr computed = run.attempt->new_event();
  device_.compute().signal(computed);
  run.fails_with(done);
  transfer::Transfer transfer{priority, {computed, room}, std::move(begin), std::move(done), nullptr};
  // From here on, the job waits for this transfer.
  transfer.settled = run.new_transfer();
  try {
    run.outgoing.push_back(transfer.settled);
  } catch (...) {
    transfer.settled->fire();
    throw;
  }
  download_.submit(std::move(transfer));
}

void Outbox::send_buffers(JobRun& run, int layer, std::vector<at::Tensor> targets,
                          const std::vector<at::Tensor>& values, const EventPtr& written) {
  auto copies = std::make_shared<std::vector<at::Tensor>>(values.size());
  const EventPtr landed = run.attempt->new_event();
  send(
      run, Priority::kActivation,
      [values, copies, &arena = memory::HostArena::values(device_.wants_pinned_host_memory())] {
        std::vector<Piece> pieces;
        for (size_t i = 0; i < values.size(); ++i) {
          const at::Tensor& from = values[i];
          (*copies)[i] = memory::empty_strided(arena, from.sizes(), from.strides(), from.scalar_type());
          pieces.push_back({(*copies)[i], from});
        }
        return pieces;
      },
      landed);
  const JobResult result{JobResult::Kind::kBuffers, layer};
  const auto contents = [copies] { return *copies; };
  if (run.keeps()) {
    // Another run of the job would read the buffers again, so they change only when it is over.
    run.attempt->then({landed}, [&run, result, contents, copies, targets = std::move(targets)] {
      if (run.attempt->claim(result, contents)) run.new_buffers.push_back({targets, *copies});
    });
    return;
  }
  run.attempt->deliver(
      landed, result, contents,
      [copies, targets = std::move(targets)] { JobRun::NewBuffers{targets, *copies}.write(); }, written);
}

void Outbox::send_values(JobRun& run, const Flow& flow, int boundary, int microbatch) {
  if (sent_before(boundary)) return;
  auto arrived = std::make_shared<std::vector<HostValuePtr>>();
  struct Outgoing {
    HostValuePtr value;
    at::Tensor tensor;
  };
  std::vector<Outgoing> outgoing;
  for (size_t i = 0; i < flow.tensors.size(); ++i) {
    HostValuePtr value = flow.host[i];
    for (const Outgoing& earlier : outgoing) {
      if (!value && earlier.tensor.is_same(flow.tensors[i])) value = earlier.value;
    }
    if (!value) {
      value = std::make_shared<HostValue>();
      value->requires_grad = flow.requires_grad[i] != 0;
      outgoing.push_back({value, flow.tensors[i]});
    }
    arrived->push_back(std::move(value));
  }
  const EventPtr landed = run.attempt->new_event();
  send(
      run, Priority::kActivation,
      [outgoing, pinned = device_.wants_pinned_host_memory()] {
        std::vector<Piece> pieces;
        for (const Outgoing& item : outgoing) {
          *item.value = *memory::stage_download(item.tensor, item.value->requires_grad, pinned, pieces);
        }
        return pieces;
      },
      landed);
  BoundaryValues& boundary_values = run.call->values(boundary, microbatch);
  run.attempt->deliver(
      landed, {JobResult::Kind::kValues, boundary, 0, microbatch},
      [arrived] {
        std::vector<at::Tensor> tensors;
        for (const HostValuePtr& value : *arrived) tensors.push_back(value ? value->data : at::Tensor());
        return tensors;
      },
      [call = run.call, &boundary_values, arrived, structure = flow.structure] {
        boundary_values.tensors = std::move(*arrived);
        boundary_values.structure = structure;
      },
      boundary_values.produced);
}

void Outbox::send_losses(JobRun& run, const std::vector<at::Tensor>& losses, int microbatch) {
  const at::NoGradGuard no_grad;
  if (sent_before(kLosses)) {
    if (are_same_losses(losses, losses_)) return;
    throw Error(concat("[forward_backward] memory ran out in the backward of microbatch ", microbatch,
                       ", and its loss, computed again, is a different one; expected one that depends only on its "
                       "arguments; this step is dropped"));
  }
  losses_.clear();
  for (const at::Tensor& loss : losses) losses_.push_back(loss.detach().clone());
  const auto place = static_cast<size_t>(microbatch);
  std::vector<Piece> pieces;
  auto arrived = std::make_shared<std::vector<at::Tensor>>(losses.size());
  const EventPtr landed = run.attempt->new_event();
  for (const at::Tensor& loss : losses) pieces.push_back({at::Tensor(), loss.detach()});
  send(
      run, Priority::kActivation,
      [arrived, pieces, &arena = memory::HostArena::values(device_.wants_pinned_host_memory())]() mutable {
        std::vector<at::Tensor>& targets = *arrived;
        for (size_t i = 0; i < pieces.size(); ++i) {
          const at::Tensor& loss = pieces[i].src;
          targets[i] =
              memory::empty_strided(arena, loss.sizes(), c10::contiguous_strides(loss.sizes()), loss.scalar_type());
          pieces[i].dst = targets[i];
        }
        return pieces;
      },
      landed);
  run.attempt->deliver(
      landed, {JobResult::Kind::kLosses, run.last_layer, 0, microbatch}, [arrived] { return *arrived; },
      [call = run.call, place, arrived] { call->losses[place] = std::move(*arrived); }, run.call->loss_ready[place]);
}

void Outbox::send_input_gradients(JobRun& run, int microbatch, std::vector<at::Tensor> gradients) {
  const int boundary = run.job.layers.first;
  const EventPtr produced = run.call->gradients(boundary, microbatch).produced;
  if (!produced) return;
  auto arrived = std::make_shared<std::vector<at::Tensor>>();
  const EventPtr landed = run.attempt->new_event();
  send(
      run, Priority::kBoundaryGradient,
      [arrived, gradients = std::move(gradients), pinned = device_.wants_pinned_host_memory()] {
        std::vector<Piece> pieces;
        std::vector<at::Tensor>& targets = *arrived;
        targets.clear();
        for (const at::Tensor& gradient : gradients) {
          if (!gradient.defined()) {
            targets.emplace_back();
            continue;
          }
          const HostValuePtr value = memory::stage_download(gradient, false, pinned, pieces);
          targets.push_back(memory::restore_broadcast(*value, value->data));
        }
        return pieces;
      },
      landed);
  run.attempt->deliver(
      landed, {JobResult::Kind::kInputGradients, boundary, 0, microbatch}, [arrived] { return *arrived; },
      [call = run.call, boundary, microbatch, arrived] {
        call->gradients(boundary, microbatch).tensors = std::move(*arrived);
      },
      produced);
}

}  // namespace roundpipe::runtime
