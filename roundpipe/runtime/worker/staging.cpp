#include <roundpipe/runtime/worker/staging.h>

#include <algorithm>

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace roundpipe::runtime {

using device::EventPtr;
using memory::HostValue;
using memory::HostValuePtr;
using schedule::Phase;
using transfer::Piece;
using transfer::Priority;

namespace {

// The place of the first entry of `values` that is the same value as the one at `place`.
size_t first_place(const std::vector<HostValuePtr>& values, size_t place) {
  return static_cast<size_t>(std::find(values.begin(), values.end(), values[place]) - values.begin());
}

// Uploads each distinct host value once.
std::vector<Piece> allocate(StagedValues& staged, c10::Device device) {
  std::vector<Piece> pieces;
  std::vector<at::Tensor> targets(staged.host.size());
  for (size_t i = 0; i < staged.host.size(); ++i) {
    if (!staged.host[i]) continue;
    const size_t first = first_place(staged.host, i);
    targets[i] = first < i ? targets[first] : memory::stage_upload(*staged.host[i], device, pieces);
  }
  staged.device = std::move(targets);
  return pieces;
}

void add_value(StagedValues& staged, const at::Tensor& tensor) {
  HostValuePtr value;
  if (tensor.defined()) {
    value = std::make_shared<HostValue>();
    value->data = memory::without_broadcast(tensor, value->expanded_sizes);
  }
  staged.host.push_back(std::move(value));
}

}  // namespace

void Staging::upload(JobRun& run, Priority priority, const EventPtr& after, const std::shared_ptr<StagedValues>& values,
                     std::function<void(StagedValues&)> fill, std::function<void()> filled) {
  values->uploaded = run.attempt->new_event();
  upload_.submit({priority,
                  {run.attempt->follow(after)},
                  // `run` outlives this: it waits for all of its transfers.
                  [this, &run, attempt = run.attempt, values, fill = std::move(fill), filled = std::move(filled),
                   torch_device = device_.torch_device()] {
                    queue_.admit(run, values->uploaded, device_.name());
                    if (fill && !values->filled) attempt->read([&] { fill(*values); });
                    values->filled = true;
                    std::vector<Piece> pieces = allocate(*values, torch_device);
                    if (filled) filled();
                    return pieces;
                  },
                  values->uploaded,
                  run.new_transfer()});
}

void Staging::stage(JobRun& run, int microbatch) {
  if (run.staged.contains(microbatch)) return;
  StagedMicrobatch& staged = run.staged[microbatch];
  const CallPtr call = run.call;
  const int first = run.job.layers.first;

  staged.inputs = std::make_shared<StagedValues>();
  upload(
      run, Priority::kActivation, call->values(first, microbatch).produced, staged.inputs,
      [call, first, microbatch](StagedValues& inputs) {
        const BoundaryValues& values = call->values(first, microbatch);
        inputs.host = values.tensors;
        inputs.structure = values.structure;
      },
      [call, first, microbatch, keeps = run.keeps()] {
        if (keeps) return;  // they stay until the job is over
        BoundaryValues& values = call->values(first, microbatch);
        if (--values.readers == 0 && !call->keep_values) values.tensors.clear();
      });

  if (run.job.phase == Phase::kFused) {
    staged.label = std::make_shared<StagedValues>();
    const EventPtr turn = call->loss_turns.empty() ? nullptr : call->loss_turns[static_cast<size_t>(microbatch)];
    upload(
        run, Priority::kActivation, turn, staged.label,
        [call, kept = run.labels, microbatch](StagedValues& label) {
          const Values& given = (kept ? kept : call->labels)->at(static_cast<size_t>(microbatch));
          label.structure = given.structure;
          for (const at::Tensor& tensor : given.tensors) add_value(label, tensor);
        },
        nullptr);
  }
  if (run.job.phase == Phase::kBackward) {
    const int last = run.job.layers.last;
    staged.gradients = std::make_shared<StagedValues>();
    upload(
        run, Priority::kBoundaryGradient, call->gradients(last, microbatch).produced, staged.gradients,
        [call, last, microbatch](StagedValues& gradients) {
          for (const at::Tensor& tensor : call->gradients(last, microbatch).tensors) add_value(gradients, tensor);
        },
        [call, last, microbatch, keeps = run.keeps()] {
          if (!keeps) call->gradients(last, microbatch).tensors.clear();
        });
  }
}

void Staging::stage_again(JobRun& run, int microbatch) {
  const StagedMicrobatch staged = run.staged.at(microbatch);
  const auto again = [&](const std::shared_ptr<StagedValues>& values, Priority priority) {
    // A transfer that has not begun arrives as submitted.
    if (!values || !values->uploaded->complete()) return;
    values->device.clear();
    upload(run, priority, nullptr, values, nullptr, nullptr);
  };
  again(staged.inputs, Priority::kActivation);
  again(staged.label, Priority::kActivation);
  again(staged.gradients, Priority::kBoundaryGradient);
}

at::Tensor Staging::usable(const HostValue& value, const at::Tensor& uploaded) {
  device_.compute().uses(uploaded);
  // Below autograd, so that autograd does not take a restored broadcast for a view of a tensor that must not be written
  // to.
  const at::AutoDispatchBelowADInplaceOrView below;
  return memory::restore_broadcast(value, uploaded);
}

std::vector<at::Tensor> Staging::take(StagedValues& staged) {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < staged.host.size(); ++i) {
    // A host value that occurs twice was one tensor, and becomes one again.
    const size_t first = first_place(staged.host, i);
    tensors.push_back(first < i        ? tensors[first]
                      : staged.host[i] ? usable(*staged.host[i], staged.device[i])
                                       : at::Tensor());
  }
  staged.device.clear();
  return tensors;
}

Flow Staging::take(JobRun& run, int microbatch) {
  StagedValues& inputs = *run.staged.at(microbatch).inputs;
  Flow flow;
  flow.tensors = take(inputs);
  flow.structure = inputs.structure;
  for (const HostValuePtr& value : inputs.host) {
    flow.requires_grad.push_back(run.call->requires_grad && value->requires_grad);
  }
  flow.host = inputs.host;
  return flow;
}

}  // namespace roundpipe::runtime
