#include <roundpipe/runtime/microbatch_runner.h>

#include <algorithm>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/error.h>
#include <roundpipe/runtime/out_of_memory.h>
#include <roundpipe/runtime/row_slices.h>

namespace roundpipe::runtime {

using memory::HostValuePtr;
using schedule::Phase;
using schedule::Range;

void MicrobatchRunner::run(JobRun& run, int microbatch, Frugality frugality) {
  frugality_ = frugality;
  recomputed_ms_ = waited_ms_ = 0;
  if (run.job.phase == Phase::kForward) {
    forward(run, microbatch);
  } else {
    train(run, microbatch);
  }
}

void MicrobatchRunner::forward(JobRun& run, int microbatch) {
  Flow flow = staging_.take(run, microbatch);
  bool still_read = false;
  for (int l = run.job.layers.first; l < run.job.layers.last; ++l) {
    if (l > run.job.layers.first && run.call->saved_boundaries[static_cast<size_t>(l)]) {
      outbox_.send_values(run, flow, l, microbatch);
      still_read = true;
    }
    flow = run_layer(run, l, flow, microbatch, /*recompute=*/false, /*protect=*/still_read);
    still_read = false;
  }
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
  // The loss by itself, so that the last layer can be cut.
  if (frugality_ == Frugality::kRows && run.job.phase == Phase::kFused) single.push_back({stage.last, stage.last});
  return single;
}

void MicrobatchRunner::train(JobRun& run, int microbatch) {
  const bool fused = run.job.phase == Phase::kFused;
  const Range stage = run.job.layers;
  const StagedMicrobatch staged = run.staged.at(microbatch);
  if (staged.gradients) {
    // Layers that write buffers recompute from what the forward saved, so that forward must be over.
    for (int l = stage.first; l < stage.last; ++l) {
      if (!run.layer(l).buffers.empty()) {
        staging_.arrive(staged.gradients->uploaded);
        break;
      }
    }
  }
  Flow flow = staging_.take(run, microbatch);
  if (nothing_to_do(run, microbatch)) {
    sums_.contribute_tied(run, microbatch, /*ran=*/false);
    outbox_.send_input_gradients(run, microbatch, Tensors(flow.tensors.size()));
    return;
  }
  std::vector<Range> left = segments(run);
  std::vector<Flow> inputs;
  for (size_t i = 0; i + 1 < left.size(); ++i) {
    inputs.push_back(flow);
    flow = run_layer(run, left[i].first, flow, microbatch, /*recompute=*/!fused, /*protect=*/true);
  }
  Tensors gradients = fused ? backpropagate_loss(run, left.back(), std::move(flow), microbatch)
                            : backpropagate_last(run, left.back(), std::move(flow), microbatch);
  flow = {};
  while (!inputs.empty()) {
    left.pop_back();
    gradients = backpropagate(run, left.back(), inputs.back(), gradients, microbatch);
    inputs.pop_back();
  }
  sums_.contribute_tied(run, microbatch, /*ran=*/true);
  outbox_.send_input_gradients(run, microbatch, std::move(gradients));
}

Flow MicrobatchRunner::run_layer(JobRun& run, int l, const Flow& inputs, int microbatch, bool recompute, bool protect) {
  LayerState& state = run.layer(l);
  const int64_t rows = frugality_ == Frugality::kRows ? rows_of(inputs) : 0;
  if (rows == 0) return layers_.run_detached(run, l, inputs, microbatch, recompute, protect);
  const int64_t known = state.rows_at_once.load();
  int64_t at_once = known > 0 ? std::min(known, rows) : rows;
  Flow outputs;
  while (true) {
    const auto body = [&] {
      outputs = at_once >= rows ? layers_.run_detached(run, l, inputs, microbatch, recompute, protect)
                                : run_layer_in_rows(run, l, inputs, microbatch, recompute, rows, at_once);
    };
    const std::exception_ptr error = out_of_memory_in(body);
    if (!error) return outputs;
    outputs = {};
    if (at_once == 1 || !rows_are_apart(run, l, inputs, microbatch)) std::rethrow_exception(error);
    at_once = (at_once + 1) / 2;
    state.rows_at_once.store(at_once);
  }
}

Flow MicrobatchRunner::run_layer_in_rows(JobRun& run, int l, const Flow& inputs, int microbatch, bool recompute,
                                         int64_t rows, int64_t at_once) {
  std::vector<Flow> input_parts, output_parts;
  for (int64_t first = 0; first < rows; first += at_once) {
    input_parts.push_back(slice_rows(inputs, rows, first, std::min(rows, first + at_once)));
    output_parts.push_back(layers_.run_detached(run, l, input_parts.back(), microbatch, recompute, /*protect=*/false));
  }
  return join_rows(inputs, rows, input_parts, output_parts);
}

bool MicrobatchRunner::rows_are_apart(JobRun& run, int l, const Flow& inputs, int microbatch) {
  LayerState& state = run.layer(l);
  if (!state.buffers.empty() && state.writes_buffers.load() != Learned::kNo) return false;
  if (state.rows_apart.load() == Learned::kUnknown) {
    constexpr int64_t kTried = 2;
    const int64_t rows = rows_of(inputs);
    Learned learned = Learned::kNo;
    try {
      std::vector<Flow> outputs;
      for (const int64_t count : {kTried, kTried - 1}) {
        const Flow part = slice_rows(inputs, rows, 0, count);
        outputs.push_back(layers_.run_detached(run, l, part, microbatch, /*recompute=*/false, /*protect=*/true));
      }
      const Flow first = slice_rows(outputs[0], kTried, 0, kTried - 1);
      bool same = outputs[0].tensors.size() == outputs[1].tensors.size();
      for (size_t i = 0; same && i < first.tensors.size(); ++i) {
        const at::Tensor& alone = outputs[1].tensors[i];
        const at::Tensor& beside = first.tensors[i];
        // Kernels may round differently for another number of rows.
        const double tolerance = alone.element_size() < 4 ? 5e-2 : 1e-4;
        same = alone.dim() > 0 && alone.sizes() == beside.sizes() &&
               (alone.is_floating_point() ? at::allclose(alone, beside, tolerance, tolerance, /*equal_nan=*/true)
                                          : at::equal(alone, beside));
      }
      if (same) learned = Learned::kYes;
    } catch (...) {
      // Not a layer whose inputs can be cut.
      if (is_out_of_memory(std::current_exception())) throw;
    }
    clear_error();
    state.rows_apart.store(learned);
  }
  return state.rows_apart.load() == Learned::kYes && state.writes_inputs.load() != Learned::kYes &&
         state.random.state.load() != RandomUse::kDraws;
}

MicrobatchRunner::Tensors MicrobatchRunner::backpropagate(JobRun& run, Range segment, const Flow& inputs,
                                                          const Tensors& gradients, int microbatch) {
  const int64_t rows = frugality_ == Frugality::kRows ? rows_of(inputs) : 0;
  if (rows == 0) return backpropagate_whole(run, segment, inputs, gradients, microbatch);
  const int64_t known = run.layer(segment.first).rows_at_once.load();
  const int64_t at_once = known > 0 ? std::min(known, rows) : rows;
  std::vector<RowGradients> parts;
  for (int64_t first = 0; first < rows; first += at_once) {
    const Range part{static_cast<int>(first), static_cast<int>(std::min(rows, first + at_once))};
    backpropagate_rows(run, segment.first, inputs, gradients, microbatch, rows, part, parts);
  }
  if (parts.size() == 1) return std::move(parts.front().gradients);
  const at::NoGradGuard no_grad;
  Tensors joined(inputs.tensors.size());
  for (size_t i = 0; i < joined.size(); ++i) {
    const auto came = [i](const RowGradients& part) { return part.gradients[i].defined(); };
    if (std::none_of(parts.begin(), parts.end(), came)) continue;
    Tensors pieces;
    for (RowGradients& part : parts) {
      pieces.push_back(came(part)
                           ? std::move(part.gradients[i])
                           : at::zeros_like(slice_rows(inputs.tensors[i], rows, part.rows.first, part.rows.last)));
    }
    joined[i] = at::cat(pieces, 0);
  }
  return joined;
}

void MicrobatchRunner::backpropagate_rows(JobRun& run, int l, const Flow& inputs, const Tensors& gradients,
                                          int microbatch, int64_t rows, Range part, std::vector<RowGradients>& parts) {
  GradientSink& sink = layers_.shell(run, l).sink;
  const GradientSink::Outer outer = sink.begin_rows();
  const std::exception_ptr error = out_of_memory_in([&] {
    const Flow some = slice_rows(inputs, rows, part.first, part.last);
    Tensors arrived;
    for (const at::Tensor& gradient : gradients) arrived.push_back(slice_rows(gradient, rows, part.first, part.last));
    parts.push_back({part, backpropagate_whole(run, {l, l + 1}, some, arrived, microbatch)});
  });
  if (error) {
    if (part.size() == 1 || !sink.can_retry() || !rows_are_apart(run, l, inputs, microbatch)) {
      std::rethrow_exception(error);
    }
    sink.retry();
    const int middle = part.first + (part.size() + 1) / 2;
    run.layer(l).rows_at_once.store(middle - part.first);
    backpropagate_rows(run, l, inputs, gradients, microbatch, rows, {part.first, middle}, parts);
    backpropagate_rows(run, l, inputs, gradients, microbatch, rows, {middle, part.last}, parts);
  }
  sink.end_rows(outer);
}

namespace {

// A segment's graph, which ends at the segment's inputs.
struct Graph {
  Boundary boundary;
  std::vector<int> places;

  std::vector<at::Tensor> input_gradients() const {
    std::vector<at::Tensor> gradients;
    for (const int place : places) {
      gradients.push_back(place < 0 ? at::Tensor() : boundary.gradient(static_cast<size_t>(place)));
    }
    return gradients;
  }
};

// What a backward begins from.
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

MicrobatchRunner::Tensors MicrobatchRunner::backpropagate_whole(JobRun& run, Range segment, const Flow& inputs,
                                                                const Tensors& gradients, int microbatch) {
  Graph graph;
  const Values outputs = layers_.run_graph(run, segment, inputs, microbatch, /*recompute=*/true, /*for_loss=*/false,
                                           graph.boundary, graph.places);
  const Roots roots(outputs, gradients);
  backward(run, segment, roots.tensors, roots.gradients);
  return graph.input_gradients();
}

MicrobatchRunner::Tensors MicrobatchRunner::backpropagate_last(JobRun& run, Range segment, Flow inputs,
                                                               int microbatch) {
  StagedValues& arriving = *run.staged.at(microbatch).gradients;
  if (frugality_ == Frugality::kRows) {
    return backpropagate(run, segment, inputs, staging_.take(arriving), microbatch);
  }
  Graph graph;
  std::optional<Roots> roots;
  {
    const Values outputs = layers_.run_graph(run, segment, inputs, microbatch, /*recompute=*/true, /*for_loss=*/false,
                                             graph.boundary, graph.places);
    inputs = {};
    recomputed_ms_ = now_ms();
    const Tensors gradients = staging_.take(arriving);
    waited_ms_ = now_ms() - recomputed_ms_;
    roots.emplace(outputs, gradients);
  }
  backward(run, segment, roots->tensors, roots->gradients);
  return graph.input_gradients();
}

MicrobatchRunner::Tensors MicrobatchRunner::backpropagate_loss(JobRun& run, Range segment, Flow inputs,
                                                               int microbatch) {
  Graph graph;
  at::Tensor total;
  {
    const bool alone = segment.size() == 0;
    const Values outputs = layers_.run_graph(run, segment, inputs, microbatch, /*recompute=*/false, /*for_loss=*/true,
                                             graph.boundary, graph.places);
    inputs = {};
    total = total_loss(run, outputs, microbatch);
    if (alone) segment = run.job.layers;
  }
  // Last, so that the caller may make the step while the gradients are still on their way.
  const at::AutoGradMode grad_mode(true);
  backward(run, segment, {total}, {});
  return graph.input_gradients();
}

void MicrobatchRunner::backward(JobRun& run, Range layers, const Tensors& roots, const Tensors& gradients) {
  if (roots.empty()) return;
  std::optional<BackwardRandomScope> scope;
  if (run.call->options.preserve_rng_state) {
    bool draws = run.job.phase == Phase::kFused && run.call->model->loss_random.state.load() == RandomUse::kDraws;
    for (int l = layers.first; l < layers.last; ++l) draws |= run.layer(l).random.state.load() == RandomUse::kDraws;
    scope.emplace(draws);
  }
  torch::autograd::backward(roots, gradients);
}

at::Tensor MicrobatchRunner::total_loss(JobRun& run, const Values& outputs, int microbatch) {
  Call& call = *run.call;
  StagedValues& staged = *run.staged.at(microbatch).label;
  Values label;
  label.tensors = staging_.take(staged);
  label.structure = staged.structure;

  if (call.keep_outputs) {
    Flow flow;
    flow.structure = outputs.structure;
    for (const at::Tensor& tensor : outputs.tensors) {
      const at::NoGradGuard no_grad;
      // The loss may write to what it is given.
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
  std::vector<at::Tensor> losses;
  at::Tensor total;
  const at::AutoGradMode grad_mode(true);
  const auto body = [&] { losses = (*run.loss)(outputs, label, context); };
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
  outbox_.send_losses(run, losses, microbatch);
  return total;
}

}  // namespace roundpipe::runtime
