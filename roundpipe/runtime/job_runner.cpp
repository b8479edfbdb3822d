#include <roundpipe/runtime/job_runner.h>

#include <algorithm>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/error.h>

namespace roundpipe::runtime {

using device::EventPtr;
using memory::HostValue;
using memory::HostValuePtr;
using schedule::Phase;
using transfer::Piece;
using transfer::Priority;

JobRunner::JobRunner(int index, device::Device& device, transfer::LinkScheduler& upload,
                     transfer::LinkScheduler& download, Shells& shells)
    : index_(index), device_(device), upload_(upload), download_(download), layers_(device, upload, download, shells) {}

namespace {

// Uploads each distinct host value once.
void allocate_staged(StagedValues& staged, c10::Device device, std::vector<Piece>& pieces) {
  staged.device.resize(staged.host.size());
  for (size_t i = 0; i < staged.host.size(); ++i) {
    if (!staged.host[i]) continue;
    const auto earlier =
        std::find(staged.host.begin(), staged.host.begin() + static_cast<std::ptrdiff_t>(i), staged.host[i]);
    const auto position = static_cast<size_t>(earlier - staged.host.begin());
    staged.device[i] = position < i ? staged.device[position] : memory::stage_upload(*staged.host[i], device, pieces);
  }
}

}  // namespace

void JobRunner::stage(JobRun& run, int microbatch) {
  if (run.staged.contains(microbatch)) return;
  StagedMicrobatch& staged = run.staged[microbatch];
  const CallPtr call = run.call;
  const c10::Device torch_device = device_.torch_device();
  const int first = run.job.layers.first;

  staged.inputs = std::make_shared<StagedValues>();
  staged.inputs->uploaded = call->new_event();
  upload_.submit({Priority::kActivation,
                  {call->values(first, microbatch).produced},
                  [call, torch_device, first, microbatch, inputs = staged.inputs] {
                    BoundaryValues& values = call->values(first, microbatch);
                    inputs->host = values.tensors;
                    inputs->structure = values.structure;
                    std::vector<Piece> pieces;
                    allocate_staged(*inputs, torch_device, pieces);
                    if (--values.readers == 0 && !call->keep_values) values.tensors.clear();
                    return pieces;
                  },
                  staged.inputs->uploaded,
                  run.new_transfer()});

  if (run.job.phase == Phase::kFused) {
    staged.label = std::make_shared<StagedValues>();
    staged.label->uploaded = call->new_event();
    upload_.submit({Priority::kActivation,
                    {},
                    [call, torch_device, microbatch, label = staged.label] {
                      std::vector<Piece> pieces;
                      const Values& given = call->labels[static_cast<size_t>(microbatch)];
                      label->structure = given.structure;
                      for (const at::Tensor& tensor : given.tensors) {
                        auto value = std::make_shared<HostValue>();
                        value->data = memory::without_broadcast(tensor, value->expanded_sizes);
                        label->host.push_back(std::move(value));
                      }
                      allocate_staged(*label, torch_device, pieces);
                      return pieces;
                    },
                    staged.label->uploaded,
                    run.new_transfer()});
  }
  if (run.job.phase == Phase::kBackward) {
    const int last = run.job.layers.last;
    staged.gradients = std::make_shared<StagedValues>();
    staged.gradients->uploaded = call->new_event();
    upload_.submit({Priority::kBoundaryGradient,
                    {call->gradients(last, microbatch).produced},
                    [call, torch_device, last, microbatch, gradients = staged.gradients] {
                      BoundaryGradients& given = call->gradients(last, microbatch);
                      std::vector<Piece> pieces;
                      for (const at::Tensor& tensor : given.tensors) {
                        HostValuePtr value;
                        if (tensor.defined()) {
                          value = std::make_shared<HostValue>();
                          value->data = memory::without_broadcast(tensor, value->expanded_sizes);
                        }
                        gradients->host.push_back(std::move(value));
                      }
                      allocate_staged(*gradients, torch_device, pieces);
                      given.tensors.clear();
                      return pieces;
                    },
                    staged.gradients->uploaded,
                    run.new_transfer()});
  }
}

namespace {

at::Tensor usable(const HostValue& value, const at::Tensor& uploaded, device::Queue& compute) {
  compute.uses(uploaded);
  // Below autograd, so that a broadcast is no view of something that must not be written to.
  const at::AutoDispatchBelowADInplaceOrView below;
  return memory::restore_broadcast(value, uploaded);
}

}  // namespace

Flow JobRunner::take(JobRun& run, int microbatch) {
  StagedValues& inputs = *run.staged.at(microbatch).inputs;
  inputs.uploaded->wait();
  Flow flow;
  flow.structure = inputs.structure;
  for (size_t i = 0; i < inputs.host.size(); ++i) {
    flow.tensors.push_back(usable(*inputs.host[i], inputs.device[i], device_.compute()));
    flow.requires_grad.push_back(run.call->options.requires_grad && inputs.host[i]->requires_grad);
  }
  flow.host = std::move(inputs.host);
  inputs.device.clear();
  return flow;
}

void JobRunner::run(JobRun& run) {
  run.uploaded->wait();
  struct Binding {
    JobRunner& runner;
    JobRun& run;
    ~Binding() {
      runner.drop_sums(run);
      runner.layers_.unbind();
    }
  } const binding{*this, run};
  layers_.bind(run);
  if (run.job.phase != Phase::kForward) begin_gradients(run);
  const schedule::Range microbatches = run.job.microbatches;
  for (int microbatch = microbatches.first; microbatch < microbatches.last; ++microbatch) {
    for (int ahead = microbatch; ahead < std::min(microbatch + kPrefetch, microbatches.last); ++ahead) {
      stage(run, ahead);
    }
    if (const std::exception_ptr error = run.call->error()) std::rethrow_exception(error);
    run.staged.at(microbatch).inputs->uploaded->wait();
    const double start_ms = now_ms();
    recomputed_ms_ = waited_ms_ = 0;
    if (run.job.phase == Phase::kForward) {
      forward(run, microbatch);
    } else {
      train(run, microbatch);
    }
    run.staged.erase(microbatch);
    limit_run_ahead(run, microbatch, start_ms);
  }
  if (run.job.phase != Phase::kForward) send_gradients(run);
  for (size_t i = 0; i < run.buffers_after.size(); ++i) {
    const EventPtr after = run.buffers_after[i];
    if (!after) continue;
    LayerState& state = run.layer(run.job.layers.first + static_cast<int>(i));
    if (state.writes_buffers.load() != Learned::kYes) {
      after->fire();
      continue;
    }
    const LayerShell& layer = *layers_.shell(run, run.job.layers.first + static_cast<int>(i)).layer;
    std::vector<Piece> pieces;
    for (size_t b = 0; b < layer.buffers.size(); ++b) {
      pieces.push_back({state.buffers[b].tensor.detach(), layer.buffers[b].detach()});
    }
    send(run, Priority::kActivation, [pieces] { return pieces; }, after);
  }
}

void JobRunner::limit_run_ahead(JobRun& run, int microbatch, double start_ms) {
  EventPtr done = run.call->new_event();
  done->then([call = run.call, job = run.job, microbatch, start_ms, device = index_, event = done.get(),
              recomputed_ms = recomputed_ms_, waited_ms = waited_ms_] {
    if (event->error()) return;
    call->record({job.phase, job.layers, microbatch, device, start_ms, event->time_ms(), recomputed_ms, waited_ms});
  });
  device_.compute().signal(done);
  launched_.push_back(std::move(done));
  // On an accelerator the host would otherwise queue the whole job and take all its memory at once.
  while (launched_.size() > kPrefetch) {
    // Only a matter of pace: the error of an earlier call must not end this one.
    launched_.front()->wait_complete();
    launched_.pop_front();
  }
}

void JobRunner::forward(JobRun& run, int microbatch) {
  Flow flow = take(run, microbatch);
  bool still_read = false;
  for (int l = run.job.layers.first; l < run.job.layers.last; ++l) {
    if (l > run.job.layers.first && run.call->saved_boundaries[static_cast<size_t>(l)]) {
      send_values(run, flow, l, microbatch);
      still_read = true;
    }
    flow = layers_.run_detached(run, l, flow, microbatch, /*recompute=*/false, /*protect=*/still_read);
    still_read = false;
  }
  send_values(run, flow, run.job.layers.last, microbatch);
}

bool JobRunner::nothing_to_do(const JobRun& run, int microbatch) const {
  const auto& gradients = run.staged.at(microbatch).gradients;
  return gradients && gradients->uploaded->complete() && !gradients->uploaded->error() &&
         std::none_of(gradients->host.begin(), gradients->host.end(),
                      [](const HostValuePtr& v) { return v != nullptr; });
}

void JobRunner::train(JobRun& run, int microbatch) {
  const bool fused = run.job.phase == Phase::kFused;
  const schedule::Range stage = run.job.layers;
  const StagedMicrobatch staged = run.staged.at(microbatch);
  if (staged.gradients) {
    // Layers that write buffers recompute from what the forward saved, so that forward must be over.
    for (int l = stage.first; l < stage.last; ++l) {
      if (!run.layer(l).buffers.empty()) {
        staged.gradients->uploaded->wait();
        break;
      }
    }
  }
  Flow flow = take(run, microbatch);
  if (nothing_to_do(run, microbatch)) {
    contribute_tied(run, microbatch, /*ran=*/false);
    send_input_gradients(run, microbatch, std::vector<at::Tensor>(flow.tensors.size()));
    return;
  }

  const int segment_size = run.call->options.recompute_grain == RecomputeGrain::kLayer ? 1 : stage.size();
  std::vector<Flow> segment_inputs;
  int first = stage.first;
  for (; first + segment_size < stage.last; ++first) {
    segment_inputs.push_back(flow);
    flow = layers_.run_detached(run, first, flow, microbatch, /*recompute=*/!fused, /*protect=*/true);
  }

  std::vector<at::Tensor> gradients;
  {
    Boundary boundary;
    std::vector<int> places;
    const Values outputs =
        layers_.run_graph(run, {first, stage.last}, flow, microbatch, /*recompute=*/!fused, boundary, places);
    flow = {};
    if (fused) {
      backpropagate_loss(run, {first, stage.last}, outputs, microbatch);
    } else {
      recomputed_ms_ = now_ms();
      staged.gradients->uploaded->wait();
      waited_ms_ = now_ms() - recomputed_ms_;
      std::vector<at::Tensor> roots;
      std::vector<at::Tensor> root_gradients;
      for (size_t i = 0; i < outputs.tensors.size() && i < staged.gradients->host.size(); ++i) {
        const HostValuePtr& value = staged.gradients->host[i];
        if (!value || !outputs.tensors[i].requires_grad()) continue;
        roots.push_back(outputs.tensors[i]);
        root_gradients.push_back(usable(*value, staged.gradients->device[i], device_.compute()));
      }
      staged.gradients->device.clear();
      backward(run, {first, stage.last}, roots, root_gradients);
    }
    for (const int place : places) {
      gradients.push_back(place < 0 ? at::Tensor() : boundary.gradient(static_cast<size_t>(place)));
    }
  }
  while (!segment_inputs.empty()) {
    --first;
    Boundary boundary;
    std::vector<int> places;
    const Values outputs = layers_.run_graph(run, {first, first + 1}, segment_inputs.back(), microbatch,
                                             /*recompute=*/true, boundary, places);
    segment_inputs.pop_back();
    std::vector<at::Tensor> roots;
    std::vector<at::Tensor> root_gradients;
    for (size_t i = 0; i < outputs.tensors.size(); ++i) {
      if (!gradients[i].defined() || !outputs.tensors[i].requires_grad()) continue;
      roots.push_back(outputs.tensors[i]);
      root_gradients.push_back(gradients[i]);
    }
    backward(run, {first, first + 1}, roots, root_gradients);
    gradients.clear();
    for (const int place : places) {
      gradients.push_back(place < 0 ? at::Tensor() : boundary.gradient(static_cast<size_t>(place)));
    }
  }
  contribute_tied(run, microbatch, /*ran=*/true);
  send_input_gradients(run, microbatch, std::move(gradients));
}

void JobRunner::backward(JobRun& run, schedule::Range layers, const std::vector<at::Tensor>& roots,
                         const std::vector<at::Tensor>& gradients) {
  if (roots.empty()) return;
  std::optional<BackwardRandomScope> scope;
  if (run.call->options.preserve_rng_state) {
    bool draws = run.job.phase == Phase::kFused && run.call->model->loss_random.state.load() == RandomUse::kDraws;
    for (int l = layers.first; l < layers.last; ++l) draws |= run.layer(l).random.state.load() == RandomUse::kDraws;
    scope.emplace(draws);
  }
  torch::autograd::backward(roots, gradients);
}

void JobRunner::backpropagate_loss(JobRun& run, schedule::Range layers, const Values& outputs, int microbatch) {
  Call& call = *run.call;
  StagedValues& staged = *run.staged.at(microbatch).label;
  staged.uploaded->wait();
  Values label;
  label.structure = staged.structure;
  for (size_t i = 0; i < staged.host.size(); ++i) {
    label.tensors.push_back(usable(*staged.host[i], staged.device[i], device_.compute()));
  }
  staged.device.clear();

  if (call.keep_outputs) {
    Flow flow;
    flow.structure = outputs.structure;
    for (const at::Tensor& tensor : outputs.tensors) {
      const at::NoGradGuard no_grad;
      // The loss may write to what it is given.
      flow.tensors.push_back(tensor.detach().clone());
      flow.requires_grad.push_back(0);
      flow.host.push_back(nullptr);
    }
    send_values(run, flow, run.last_layer, microbatch);
  }

  LayerContext context;
  context.call = call.id;
  context.layer = run.last_layer;
  context.microbatch = microbatch;
  context.queue = &device_.compute();
  std::vector<at::Tensor> losses;
  at::Tensor total;
  {
    const at::AutoGradMode grad_mode(true);
    const auto body = [&] { losses = (*call.loss)(outputs, label, context); };
    if (call.options.preserve_rng_state) {
      with_seeded_generators(call.model->loss_random,
                             layer_seed(call.base_seed, call.model->name, call.index, microbatch, run.last_layer),
                             device_.torch_device(), /*watch=*/true, body);
    } else {
      body();
    }
    for (const at::Tensor& loss : losses) {
      if (loss.requires_grad()) total = total.defined() ? total + loss : loss;
    }
    if (!total.defined()) {
      throw std::invalid_argument(
          "[forward_backward] the loss does not require grad: nothing that it depends on is trainable; check "
          "requires_grad of the parameters, and that loss_fn uses the outputs");
    }
  }
  std::vector<at::Tensor>& kept = call.losses[static_cast<size_t>(microbatch)];
  std::vector<Piece> pieces;
  {
    const at::NoGradGuard no_grad;
    kept.resize(losses.size());
    for (size_t i = 0; i < losses.size(); ++i) pieces.push_back({at::Tensor(), losses[i].detach()});
  }
  send(
      run, Priority::kActivation,
      [call_ptr = run.call, microbatch, pieces]() mutable {
        std::vector<at::Tensor>& targets = call_ptr->losses[static_cast<size_t>(microbatch)];
        for (size_t i = 0; i < pieces.size(); ++i) {
          targets[i] = at::empty(pieces[i].src.sizes(), pieces[i].src.options().device(c10::kCPU));
          pieces[i].dst = targets[i];
        }
        return pieces;
      },
      call.loss_ready[static_cast<size_t>(microbatch)]);
  // Last, so that the caller may make the step while the gradients are still on their way.
  const at::AutoGradMode grad_mode(true);
  backward(run, layers, {total}, {});
}

void JobRunner::begin_gradients(JobRun& run) {
  const at::NoGradGuard no_grad;
  sums_.clear();
  std::vector<EventPtr> arrived;
  std::vector<std::function<void()>> spread;
  for (int l = run.job.layers.first; l < run.job.layers.last; ++l) {
    const LayerState& state = run.layer(l);
    layers_.shell(run, l).sink.reset(state.parameters.size());
    for (const size_t block : state.blocks) {
      if (!run.call->model->blocks[block].tied() && run.call->results[block]) begin_sum(run, l, block, arrived, spread);
    }
  }
  for (size_t i = 0; i < arrived.size(); ++i) {
    arrived[i]->wait();
    spread[i]();
  }
}

void JobRunner::begin_sum(JobRun& run, int layer, size_t own, std::vector<EventPtr>& arrived,
                          std::vector<std::function<void()>>& spread) {
  const Call& call = *run.call;
  const LayerState& state = run.layer(layer);
  GradientSink& sink = layers_.shell(run, layer).sink;
  const memory::BlockLayout& host_layout = call.model->blocks[own].gradient_layout;
  GradientSum& sum = sums_.emplace_back();
  sum.layer = layer;
  sum.block = own;
  sum.layout = call.options.sum_in_native_precision ? host_layout : host_layout.widened();
  sum.flat = at::empty({sum.layout.size_bytes}, at::TensorOptions().dtype(at::kByte).device(device_.torch_device()));
  for (size_t i = 0; i < state.parameters.size(); ++i) {
    if (state.parameters[i].block != own || !call.trainable[static_cast<size_t>(layer)][i]) continue;
    sink.targets[i] = sum.layout.view(sum.flat, state.parameters[i].index);
  }
  // The sum goes on from what earlier calls left, so that bits are those of one loop over all microbatches.
  const memory::GradientBlockPtr base = call.bases[own];
  if (!base || run.range_index[run.place(layer)] != 0) return;
  auto uploaded = std::make_shared<at::Tensor>();
  EventPtr done = run.call->new_event();
  upload_.submit({Priority::kBoundaryGradient,
                  {base->landed},
                  [base, uploaded, torch_device = device_.torch_device()] {
                    std::vector<Piece> pieces;
                    if (!base->flat.defined()) return pieces;
                    *uploaded =
                        at::empty(base->flat.sizes(), base->flat.options().device(torch_device).pinned_memory(false));
                    pieces.push_back({*uploaded, base->flat});
                    return pieces;
                  },
                  done,
                  run.new_transfer()});
  arrived.push_back(done);
  spread.push_back([this, &state, &sink, &sum, &host_layout, base, uploaded] {
    if (!uploaded->defined()) return;
    device_.compute().uses(*uploaded);
    for (size_t i = 0; i < state.parameters.size(); ++i) {
      const auto [block, index] = state.parameters[i];
      if (block != sum.block || !base->received[index]) continue;
      sum.layout.view(sum.flat, index).copy_(host_layout.view(*uploaded, index));
      sink.received[i] = 1;
    }
  });
}

void JobRunner::contribute_tied(JobRun& run, int microbatch, bool ran) {
  const Call& call = *run.call;
  for (int l = run.job.layers.first; l < run.job.layers.last; ++l) {
    const LayerState& state = run.layer(l);
    GradientSink& sink = layers_.shell(run, l).sink;
    for (const size_t block : state.blocks) {
      const BlockState& shared = call.model->blocks[block];
      if (!shared.tied() || !call.results[block]) continue;
      const auto sharer =
          static_cast<size_t>(std::find(shared.layers.begin(), shared.layers.end(), l) - shared.layers.begin());
      std::vector<Piece> pieces;
      std::vector<size_t> indices;
      for (size_t i = 0; i < state.parameters.size(); ++i) {
        if (state.parameters[i].block != block || !ran || !sink.tied[i].defined()) continue;
        pieces.push_back({at::Tensor(), std::move(sink.tied[i])});
        indices.push_back(state.parameters[i].index);
        sink.tied[i].reset();
      }
      auto landed = std::make_shared<std::vector<at::Tensor>>(shared.gradient_layout.tensors.size());
      EventPtr done = run.call->new_event();
      send(
          run, Priority::kParameterGradient,
          [pieces, indices, landed, pinned = device_.wants_pinned_host_memory()]() mutable {
            for (size_t i = 0; i < pieces.size(); ++i) {
              at::Tensor& target = (*landed)[indices[i]];
              const auto options = pieces[i].src.options().device(c10::kCPU).pinned_memory(pinned);
              target = at::empty_like(pieces[i].src, options);
              pieces[i].dst = target;
            }
            return pieces;
          },
          done);
      // The sum starts from what the call before leaves, which may still be on its way.
      const EventPtr base = call.bases[block] ? call.bases[block]->landed : nullptr;
      device::when_all({done, base}, [call_ptr = run.call, block, sharer, microbatch, landed, done, base] {
        if (done->error()) return;
        if (base && base->error()) return call_ptr->fail(base->error());
        call_ptr->tied_sums[block]->contribute(sharer, static_cast<size_t>(microbatch), std::move(*landed));
      });
    }
  }
}

namespace {

bool same_dtypes(const memory::BlockLayout& a, const memory::BlockLayout& b) {
  return std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
                    [](const auto& x, const auto& y) { return x.dtype == y.dtype; });
}

}  // namespace

void JobRunner::send_gradients(JobRun& run) {
  const at::NoGradGuard no_grad;
  Call& call = *run.call;
  for (GradientSum& sum : sums_) {
    const LayerState& state = run.layer(sum.layer);
    const GradientSink& sink = layers_.shell(run, sum.layer).sink;
    const memory::BlockLayout& layout = call.model->blocks[sum.block].gradient_layout;
    std::vector<char> received(layout.tensors.size(), 0);
    for (size_t i = 0; i < state.parameters.size(); ++i) {
      if (state.parameters[i].block == sum.block) received[state.parameters[i].index] = sink.received[i];
    }
    at::Tensor rounded = sum.flat;
    if (!same_dtypes(sum.layout, layout)) {
      rounded = at::empty({layout.size_bytes}, sum.flat.options());
      for (size_t index = 0; index < received.size(); ++index) {
        if (received[index]) layout.view(rounded, index).copy_(sum.layout.view(sum.flat, index));
      }
    }
    const bool any = std::find(received.begin(), received.end(), 1) != received.end();
    auto landed = std::make_shared<at::Tensor>();
    EventPtr done = run.call->new_event();
    send(
        run, Priority::kParameterGradient,
        [rounded, any, landed, buffers = call.model->blocks[sum.block].gradient_buffers] {
          std::vector<Piece> pieces;
          if (!any) return pieces;
          *landed = buffers->take();
          pieces.push_back({*landed, rounded});
          return pieces;
        },
        done);
    done->then([call_ptr = run.call, block = sum.block, range = run.range_index[run.place(sum.layer)], landed, received,
                event = done.get()] {
      if (event->error()) return;
      call_ptr->range_sums[block]->add(range, std::move(*landed), received);
    });
  }
  drop_sums(run);
}

void JobRunner::drop_sums(JobRun& run) {
  for (const GradientSum& sum : sums_) {
    layers_.shell(run, sum.layer).sink.reset(run.layer(sum.layer).parameters.size());
  }
  sums_.clear();
}

void JobRunner::send(JobRun& run, Priority priority, std::function<std::vector<Piece>()> begin, EventPtr done) {
  EventPtr computed = run.call->new_event();
  device_.compute().signal(computed);
  run.fails_with(done);
  download_.submit({priority, {computed}, std::move(begin), std::move(done), run.new_transfer()});
}

void JobRunner::send_values(JobRun& run, const Flow& flow, int boundary, int microbatch) {
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
          *item.value = *memory::make_host_value(item.tensor, item.value->requires_grad, pinned);
          std::vector<int64_t> unused;
          pieces.push_back({item.value->data, memory::without_broadcast(item.tensor, unused)});
        }
        return pieces;
      },
      values.produced);
}

void JobRunner::send_input_gradients(JobRun& run, int microbatch, std::vector<at::Tensor> gradients) {
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
          const HostValuePtr value = memory::make_host_value(gradient, false, pinned);
          std::vector<int64_t> expanded;
          pieces.push_back({value->data, memory::without_broadcast(gradient, expanded)});
          targets.push_back(expanded.empty() ? value->data : value->data.expand(expanded));
        }
        return pieces;
      },
      produced);
}

}  // namespace roundpipe::runtime
