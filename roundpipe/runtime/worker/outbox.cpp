#include <roundpipe/runtime/worker/outbox.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
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

void Outbox::send(JobRun& run, Priority priority, std::function<std::vector<Piece>()> begin, EventPtr done) {
  EventPtr computed = run.call->new_event();
  device_.compute().signal(computed);
  run.fails_with(done);
  transfer::Transfer transfer{priority, {computed}, std::move(begin), std::move(done), nullptr};
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

void Outbox::send_staged(JobRun& run, const std::vector<Piece>& pieces, const EventPtr& done) {
  auto copies = std::make_shared<std::vector<at::Tensor>>(pieces.size());
  std::vector<at::Tensor> targets;
  for (const Piece& piece : pieces) targets.push_back(piece.dst);
  EventPtr landed = run.call->new_event();
  run.fails_with(done);
  send(
      run, Priority::kActivation,
      [pieces, copies] {
        std::vector<Piece> downloads;
        for (size_t i = 0; i < pieces.size(); ++i) {
          const at::Tensor& from = pieces[i].src;
          (*copies)[i] = memory::empty_strided(memory::HostArena::values(/*page_locked=*/true), from.sizes(),
                                               from.strides(), from.scalar_type());
          downloads.push_back({(*copies)[i], from});
        }
        return downloads;
      },
      landed);
  run.call->then({landed}, [targets, copies, done] {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_((*copies)[i]);
    done->fire();
  });
}

void Outbox::send_values(JobRun& run, const Flow& flow, int boundary, int microbatch) {
  if (sent_before(boundary)) return;
  BoundaryValues& values = run.call->values(boundary, microbatch);
  values.structure = flow.structure;
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
    values.tensors.push_back(std::move(value));
  }
  send(
      run, Priority::kActivation,
      [outgoing, pinned = device_.wants_pinned_host_memory()] {
        std::vector<Piece> pieces;
        for (const Outgoing& item : outgoing) {
          *item.value = *memory::stage_download(item.tensor, item.value->requires_grad, pinned, pieces);
        }
        return pieces;
      },
      values.produced);
}

void Outbox::send_losses(JobRun& run, const std::vector<at::Tensor>& losses, int microbatch) {
  const at::NoGradGuard no_grad;
  if (sent_before(kLosses)) {
    bool same = losses.size() == losses_.size();
    for (size_t i = 0; same && i < losses.size(); ++i) {
      same = at::allclose(losses[i], losses_[i], /*rtol=*/1e-3, /*atol=*/1e-5, /*equal_nan=*/true);
    }
    if (same) return;
    throw Error(
        concat("[forward_backward] memory ran out in the backward of microbatch ", microbatch,
               ", and its loss, computed again, is a different one; expected a loss_fn that depends only on its "
               "arguments; this step is dropped"));
  }
  losses_.clear();
  for (const at::Tensor& loss : losses) losses_.push_back(loss.detach().clone());
  const auto place = static_cast<size_t>(microbatch);
  std::vector<Piece> pieces;
  run.call->losses[place].resize(losses.size());
  for (const at::Tensor& loss : losses) pieces.push_back({at::Tensor(), loss.detach()});
  send(
      run, Priority::kActivation,
      [call = run.call, place, pieces,
       &arena = memory::HostArena::values(device_.wants_pinned_host_memory())]() mutable {
        std::vector<at::Tensor>& targets = call->losses[place];
        for (size_t i = 0; i < pieces.size(); ++i) {
          const at::Tensor& loss = pieces[i].src;
          targets[i] =
              memory::empty_strided(arena, loss.sizes(), c10::contiguous_strides(loss.sizes()), loss.scalar_type());
          pieces[i].dst = targets[i];
        }
        return pieces;
      },
      run.call->loss_ready[place]);
}

void Outbox::send_input_gradients(JobRun& run, int microbatch, std::vector<at::Tensor> gradients) {
  const int boundary = run.job.layers.first;
  const EventPtr produced = run.call->gradients(boundary, microbatch).produced;
  if (!produced) return;
  send(
      run, Priority::kBoundaryGradient,
      [call = run.call, boundary, microbatch, gradients = std::move(gradients),
       pinned = device_.wants_pinned_host_memory()] {
        std::vector<Piece> pieces;
        std::vector<at::Tensor>& targets = call->gradients(boundary, microbatch).tensors;
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
      produced);
}

}  // namespace roundpipe::runtime
