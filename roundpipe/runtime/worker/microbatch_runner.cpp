#include <roundpipe/runtime/worker/microbatch_runner.h>

#include <algorithm>
#include <optional>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/runtime/call/loss_reduction.h>

namespace roundpipe::runtime {

using memory::HostValuePtr;
using schedule::Phase;
using schedule::Range;

void MicrobatchRunner::run(JobRun& run, int microbatch, Frugality frugality) {
  frugality_ = frugality;
  doing_ = {"the inputs", run.job.layers};
  gradient_wait_ = {};
  const LossScale::Scope of_call(run.call->model->loss_scales, run.call->loss_scales);
  if (!run.call->options.preserve_rng_state) {
    const uint64_t seed = run.call->seed(run.job.layers.first, microbatch);
    torch_compat::OwnGenerators::current()->seed(run.job.phase == Phase::kForward ? seed : backward_seed(seed));
  }
  if (run.job.phase == Phase::kForward) {
    forward(run, microbatch);
  } else {
    train(run, microbatch);
  }
}

void MicrobatchRunner::forward(JobRun& run, int microbatch) {
  Flow flow = room_.take(run, microbatch);
  bool still_read = false;
  LayerRunner::Together together(layers_, run);
  for (int l = run.job.layers.first; l < run.job.layers.last; ++l) {
    if (l > run.job.layers.first && run.call->saved_boundaries[static_cast<size_t>(l)]) {
      together.pause();
      outbox_.send_values(run, flow, l, microbatch);
      still_read = true;
    }
    flow = run_layer(run, l, flow, microbatch, /*recompute=*/false, /*protect=*/still_read);
    still_read = false;
  }
  together.pause();
  outbox_.send_values(run, flow, run.job.layers.last, microbatch);
}

bool MicrobatchRunner::nothing_to_do(const JobRun& run, int microbatch) const {
  const auto& gradients = run.staged.at(microbatch).gradients;
  return gradients && gradients->uploaded->complete() && !gradients->uploaded->error() &&
         std::none_of(gradients->host.begin(), gradients->host.end(),
                      [](const HostValuePtr& v) { return v != nullptr; });
}

std::vector<Range> MicrobatchRunner::segments(const JobRun& run) const {
  const Range stage = run.job.layers;
  if (frugality_ == Frugality::kStage) return {stage};
  std::vector<Range> single;
  for (int l = stage.first; l < stage.last; ++l) single.push_back({l, l + 1});
  return single;
}

Flow MicrobatchRunner::run_layer(JobRun& run, int l, const Flow& inputs, int microbatch, bool recompute, bool protect) {
  doing_ = {recompute ? "the recomputation" : "the forward", {l, l + 1}};
  return layers_.run_detached(run, l, inputs, microbatch, recompute, protect);
}

void MicrobatchRunner::train(JobRun& run, int microbatch) {
  const bool fused = run.job.phase == Phase::kFused;
  const Range stage = run.job.layers;
  const StagedMicrobatch staged = run.staged.at(microbatch);
  if (staged.gradients) {
    // Layers that write buffers recompute from the forward's snapshots, so that forward must be over.
    for (int l = stage.first; l < stage.last; ++l) {
      if (!run.layer(l).buffers.empty()) {
        room_.arrive(staged.gradients->uploaded);
        break;
      }
    }
  }
  Flow flow = room_.take(run, microbatch);
  if (nothing_to_do(run, microbatch)) {
    sums_.contribute_tied(run, microbatch, /*ran=*/false);
    outbox_.send_input_gradients(run, microbatch, Tensors(flow.tensors.size()));
    return;
  }
  std::vector<Range> left = segments(run);
  std::vector<Flow> inputs;
  {
    LayerRunner::Together together(layers_, run);
    for (size_t i = 0; i + 1 < left.size(); ++i) {
      inputs.push_back(flow);
      flow = run_layer(run, left[i].first, flow, microbatch, /*recompute=*/!fused, /*protect=*/true);
    }
    together.pause();
  }
  Tensors gradients = fused ? backpropagate_loss(run, left.back(), std::move(flow), microbatch)
                            : backpropagate_last(run, left.back(), std::move(flow), microbatch);
  flow = {};
  while (!inputs.empty()) {
    sums_.over(run, microbatch, left.back().first);
    left.pop_back();
    gradients = backpropagate(run, left.back(), inputs.back(), gradients, microbatch);
    inputs.pop_back();
  }
  sums_.learn(run);
  sums_.contribute_tied(run, microbatch, /*ran=*/true);
  outbox_.send_input_gradients(run, microbatch, std::move(gradients));
}

namespace {

// The outputs that a backward starts from, with their gradients.
struct Roots {
  Roots(const Values& outputs, const std::vector<at::Tensor>& output_gradients) {
    for (size_t i = 0; i < outputs.tensors.size() && i < output_gradients.size(); ++i) {
      if (!output_gradients[i].defined() || !outputs.tensors[i].requires_grad()) continue;
      tensors.push_back(outputs.tensors[i]);
      gradients.push_back(output_gradients[i]);
    }
  }
  std::vector<at::Tensor> tensors;
  std::vector<at::Tensor> gradients;
};

}  // namespace

SegmentGraph MicrobatchRunner::new_graph(JobRun& run, int microbatch) {
  SegmentGraph graph;
  graph.passed = std::make_shared<const SegmentGraph::Passed>(
      [this, &run, microbatch](int layer) { sums_.passed(run, microbatch, layer + 1); });
  return graph;
}

MicrobatchRunner::Tensors MicrobatchRunner::backpropagate(JobRun& run, Range segment, const Flow& inputs,
                                                          const Tensors& gradients, int microbatch) {
  doing_ = {"the recomputation", segment};
  SegmentGraph graph = new_graph(run, microbatch);
  const Values outputs =
      layers_.run_graph(run, segment, inputs, microbatch, /*recompute=*/true, /*for_loss=*/false, graph);
  const Roots roots(outputs, gradients);
  backward(run, segment, microbatch, /*from_loss=*/false, roots.tensors, roots.gradients, graph.clock.get());
  return graph.input_gradients();
}

MicrobatchRunner::Tensors MicrobatchRunner::backpropagate_last(JobRun& run, Range segment, Flow inputs,
                                                               int microbatch) {
  StagedValues& arriving = *run.staged.at(microbatch).gradients;
  doing_ = {"the recomputation", segment};
  SegmentGraph graph = new_graph(run, microbatch);
  std::optional<Roots> roots;
  {
    const Values outputs =
        layers_.run_graph(run, segment, inputs, microbatch, /*recompute=*/true, /*for_loss=*/false, graph);
    inputs = {};
    gradient_wait_.recomputed = device_.compute().mark();
    const Tensors gradients = room_.take(arriving);
    gradient_wait_.arrived_ms = now_ms();
    roots.emplace(outputs, gradients);
  }
  backward(run, segment, microbatch, /*from_loss=*/false, roots->tensors, roots->gradients, graph.clock.get());
  return graph.input_gradients();
}

MicrobatchRunner::Tensors MicrobatchRunner::backpropagate_loss(JobRun& run, Range segment, Flow inputs,
                                                               int microbatch) {
  doing_ = {"the forward", segment};
  SegmentGraph graph = new_graph(run, microbatch);
  at::Tensor total;
  {
    const Values outputs =
        layers_.run_graph(run, segment, inputs, microbatch, /*recompute=*/false, /*for_loss=*/true, graph);
    inputs = {};
    doing_ = {"the loss", segment};
    total = total_loss(run, outputs, microbatch);
  }
  // Last, so that the caller may make the step while the gradients are still in flight.
  const at::AutoGradMode grad_mode(true);
  const Tensors roots = total.defined() ? Tensors{total} : Tensors{};
  backward(run, segment, microbatch, /*from_loss=*/true, roots, {}, graph.clock.get());
  return graph.input_gradients();
}

void MicrobatchRunner::backward(JobRun& run, Range layers, int microbatch, bool from_loss, const Tensors& roots,
                                const Tensors& gradients, BackwardClock* clock) {
  if (roots.empty()) return;
  doing_ = {"the backward", layers};
  const auto body = [&] {
    if (clock != nullptr) clock->reached(layers.last - 1);
    torch::autograd::backward(roots, gradients);
    if (clock != nullptr) clock->over(run);
  };
  if (!run.call->options.preserve_rng_state) return body();
  std::vector<SharedDraws*> draws;
  for (int l = layers.first; l < layers.last; ++l) draws.push_back(&run.habits(l).shared_draws);
  if (from_loss) draws.push_back(&run.call->model->loss_shared_draws);
  const int top = from_loss ? run.last_layer : layers.last - 1;
  run_backward(*torch_compat::OwnGenerators::current(), draws, backward_seed(run.call->seed(top, microbatch)),
               device_.torch_device(), body);
}

at::Tensor MicrobatchRunner::total_loss(JobRun& run, const Values& outputs, int microbatch) {
  Call& call = *run.call;
  StagedValues& staged = *run.staged.at(microbatch).label;
  Values label;
  label.tensors = room_.take(staged);
  label.structure = staged.structure;

  if (call.keep_outputs) {
    Flow flow;
    flow.structure = outputs.structure;
    for (const at::Tensor& tensor : outputs.tensors) {
      const at::NoGradGuard no_grad;
      // The loss may write to its arguments.
      flow.tensors.push_back(memory::copy_alike(tensor.detach()));
      flow.requires_grad.push_back(0);
      flow.host.push_back(nullptr);
    }
    outbox_.send_values(run, flow, run.last_layer, microbatch);
  }

  LayerContext context;
  context.call = call.id;
  context.layer = run.last_layer;
  context.microbatch = microbatch;
  context.queue = &device_.compute();
  require_no_locks("a loss");
  std::vector<at::Tensor> losses;
  at::Tensor total;
  const at::AutoGradMode grad_mode(true);
  const auto body = [&] { losses = (*run.loss)(outputs, label, context); };
  if (call.options.preserve_rng_state) {
    context.seed = call.seed(run.last_layer, microbatch);
    run_seeded(*torch_compat::OwnGenerators::current(), call.model->loss_shared_draws, *context.seed,
               device_.torch_device(), body);
  } else {
    body();
  }
  if (call.terms.refuses_nan_early && !LossScale::Scope::take_scaled()) {
    for (const at::Tensor& loss : losses) {
      if (loss.isnan().any().item<bool>()) throw Error(nan_loss(""));
    }
  }
  call.model->notify(ModelState::Notice::kLoss, run.loss->notice());
  call.let_losses_go_on(run.loss->is_open(), microbatch);
  for (const at::Tensor& loss : losses) {
    if (loss.requires_grad()) total = total.defined() ? total + loss : loss;
  }
  if (!total.defined() && call.lacks_gradient(microbatch)) {
    throw std::invalid_argument(
        "[forward_backward] the loss does not require grad: nothing that it depends on is trainable; check "
        "requires_grad of the parameters, and that the loss uses the outputs");
  }
  outbox_.send_losses(run, losses, microbatch);
  return total;
}

}  // namespace roundpipe::runtime
