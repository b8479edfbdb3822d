#include <roundpipe/runtime/worker/layer_runner.h>

#include <algorithm>
#include <bit>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/torch_compat/profiler_range.h>

namespace roundpipe::runtime {

using device::EventPtr;
using memory::HostValuePtr;
using transfer::Piece;
using transfer::Priority;

void LayerRunner::begin(JobRun& run) {
  bind(run);
  watches_.resize(bound_.size());
}

void LayerRunner::await_weights(JobRun& run, int l) {
  const EventPtr& uploaded = run.layers_uploaded[run.place(l)];
  if (!uploaded->complete()) {
    pause(run);
    waits_.emplace_back(device_.compute().mark(), uploaded);
    const Watch::Pause waiting(watch_);
    uploaded->wait_complete();
  }
  uploaded->wait();
  LayerHabits& habits = run.habits(l);
  // A layer may begin to write long after its first job, so it is looked at again, ever more seldom.
  const bool is_turn = std::has_single_bit(++habits.jobs);
  const bool looks = !run.layer(l).layer->leaves_parameters() && is_turn;
  std::vector<char> with_values;
  for (const std::atomic<bool>& touches : habits.touches_parameters) with_values.push_back(looks || touches.load());
  watches_[run.place(l)].emplace(shell(run, l).layer->parameters, with_values);
}

void LayerRunner::end() {
  watches_.clear();
  waits_.clear();
  unbind();
}

void LayerRunner::bind(JobRun& run) {
  const at::NoGradGuard no_grad;
  Call& call = *run.call;
  for (int l = run.job.layers.first; l < run.job.layers.last; ++l) {
    const LayerState& state = run.layer(l);
    const StageLayout::LayerPlace& place = run.layout.layers[run.place(l)];
    const auto number = static_cast<size_t>(l);
    Shell& shell =
        call.model->shells.get(worker_, number, *state.layer, device_.torch_device(), call.attributes[number]);
    LayerShell& layer = *shell.layer;
    const auto know_nothing = [&] {
      for (const auto* tensors : {&layer.parameters, &layer.buffers}) {
        for (const at::Tensor& tensor : *tensors) {
          at::Tensor& nothing = nothing_[tensor.scalar_type()];
          if (!nothing.defined()) nothing = at::empty({0}, tensor.options());
        }
      }
    };
    know_nothing();
    bound_.push_back(&shell);
    for (size_t i = 0; i < state.parameters.size(); ++i) {
      const auto [block, index] = state.parameters[i];
      size_t position = 0;
      while (state.blocks[position] != block) ++position;
      const memory::BlockLayout& layout = call.model->blocks[block].block->layout();
      at::Tensor& leaf = layer.parameters[i];
      const auto resident = run.residents.find(block);
      leaf.set_data(resident != run.residents.end() ? layout.view(resident->second.weights, index)
                                                    : layout.view(run.weights, index, place.blocks_at[position]));
      // Without gradients, too: torch chooses products by it, and the plain model's weights have it then.
      leaf.set_requires_grad(call.trainable[number][i] != 0);
    }
    for (size_t i = 0; i < state.buffers.size(); ++i) {
      layer.buffers[i].set_data(state.buffer_layout.view(run.weights, i, place.buffers_at));
    }
    know_nothing();  // a copy may have been made in another dtype
  }
  for (std::optional<ParameterWatch>& watch : watches_) {
    if (watch) watch->moved();
  }
}

void LayerRunner::unbind() {
  const at::NoGradGuard no_grad;
  for (Shell* shell : bound_) {
    for (auto* tensors : {&shell->layer->parameters, &shell->layer->buffers}) {
      for (at::Tensor& tensor : *tensors) tensor.set_data(nothing_.at(tensor.scalar_type()));
    }
  }
  bound_.clear();
}

namespace {

std::vector<uint32_t> versions_of(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& buffers) {
  std::vector<uint32_t> versions;
  for (const auto* tensors : {&inputs, &buffers}) {
    for (const at::Tensor& tensor : *tensors) versions.push_back(static_cast<uint32_t>(tensor._version()));
  }
  return versions;
}

// One microbatch of a job is enough: the last, since kernels are chosen or compiled during the first.
bool times_layers(const JobRun& run, int microbatch) { return microbatch + 1 == run.job.microbatches.last; }

// Of the tensors as they cross to another device, each once.
int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].defined() && memory::place_of(tensors[i], tensors) == i) bytes += memory::settled_bytes(tensors[i]);
  }
  return bytes;
}

}  // namespace

void LayerRunner::hold(const JobRun& run, int l) {
  std::shared_ptr<const void> held = run.layer(l).buffers.empty() ? run.layer(l).layer->hold() : nullptr;
  if (!held_ || !held) held_ = std::move(held);
}

void LayerRunner::let_go() noexcept {
  held_.reset();
  clocked_.clear();
}

void LayerRunner::pause(JobRun& run) {
  held_.reset();
  for (const Clocked& clocked : clocked_) {
    run.attempt->then({clocked.begun, clocked.done}, [log = run.call->log, device = run.job.device, clocked] {
      const double took_ms = clocked.done->time_ms() - clocked.begun->time_ms();
      log->add(LayerTime{clocked.layer, device, /*backward=*/false, took_ms, clocked.output_bytes});
    });
  }
  clocked_.clear();
}

Values LayerRunner::execute(JobRun& run, int l, const Values& inputs, int microbatch, Use use) {
  require_no_locks("a layer");
  const bool recompute = use.recompute;
  Call& call = *run.call;
  LayerState& state = run.layer(l);
  LayerShell& layer = *shell(run, l).layer;
  if (!watches_[run.place(l)]) await_weights(run, l);
  hold(run, l);
  const bool has_buffers = !state.buffers.empty();
  const bool gradients = call.requires_grad;
  // Snapshots serve three purposes: a backward needs one per microbatch, a failed call the one before its first
  // microbatch, and a layer that runs out of memory the one before the layer.
  const bool keep_before = gradients || microbatch == run.job.microbatches.first;
  std::vector<at::Tensor> before;
  std::vector<uint32_t> versions;
  if (has_buffers && recompute) restore_buffers(run, l, microbatch);
  if (has_buffers && !recompute) {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& buffer : layer.buffers) {
      versions.push_back(static_cast<uint32_t>(buffer._version()));
      if (run.habits(l).writes_buffers.load() != Learned::kNo) before.push_back(buffer.clone());
    }
  }

  LayerContext context;
  context.call = call.id;
  context.layer = l;
  context.microbatch = microbatch;
  context.recompute = recompute;
  context.outputs_are_read = use.outputs_are_read;
  context.queue = &device_.compute();
  Values outputs;
  const std::vector<uint32_t> untouched = versions_of(inputs.tensors, layer.buffers);
  bool repeated = false;
  const auto body = [&] {
    if (repeated && versions_of(inputs.tensors, layer.buffers) != untouched) {
      throw Error(concat("[forward] layer ", l, " (", state.layer->name(),
                         ") turned out to draw from the default generator of ", device_.name(),
                         ", and changes its inputs or buffers, so it could not run again; this step is dropped, the "
                         "next ones take it into account"));
    }
    repeated = true;
    const torch_compat::ProfilerRange range(
        [&] { return concat("roundpipe layer ", l, recompute ? " recompute: " : " forward: ", state.layer->name()); });
    if (times_layers(run, microbatch)) {
      const EventPtr begun = device_.compute().mark();
      outputs = layer.forward(inputs, context);
      clocked_.push_back({l, bytes_of(outputs.tensors), begun, device_.compute().mark()});
    } else {
      outputs = layer.forward(inputs, context);
    }
  };
  const auto put_back = [&] {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < before.size(); ++i) layer.buffers[i].copy_(before[i]);
  };
  try {
    if (call.options.preserve_rng_state) {
      run_seeded(*torch_compat::OwnGenerators::current(), run.habits(l).shared_draws, call.seed(l, microbatch),
                 device_.torch_device(), body, [this] { held_.reset(); });
    } else {
      body();
    }
  } catch (...) {
    put_back();
    throw;
  }

  look_at_weights(run, l, microbatch);
  if (has_buffers && !recompute) {
    bool written = false;
    for (size_t i = 0; i < versions.size(); ++i) {
      written |= static_cast<uint32_t>(layer.buffers[i]._version()) != versions[i];
    }
    if (written) {
      const bool late = run.habits(l).writes_buffers.exchange(Learned::kYes) == Learned::kNo;
      if (late && gradients) {
        throw Error(concat("[forward] layer ", l, " (", state.layer->name(),
                           ") changed a buffer only after it had run without doing so; this step is dropped, "
                           "the next ones take it into account"));
      }
      if (keep_before && !before.empty()) save_buffers(run, l, microbatch, std::move(before));
    } else {
      Learned unknown = Learned::kUnknown;
      run.habits(l).writes_buffers.compare_exchange_strong(unknown, Learned::kNo);
    }
  }
  return outputs;
}

void LayerRunner::look_at_weights(JobRun& run, int l, int microbatch) {
  LayerState& state = run.layer(l);
  ParameterWatch& watch = *watches_.at(run.place(l));
  const bool first = microbatch == run.job.microbatches.first;
  for (size_t i = 0; i < state.parameters.size(); ++i) {
    const bool touched = watch.touched(i);
    if (touched) run.habits(l).touches_parameters[i].store(true);
    if (!touched && !(first && watch.has_values(i))) continue;
    if (watch.has_values(i) && watch.look(i)) continue;
    const std::string layer = concat("layer ", l, " (", state.layer->name(), ")");
    if (!watch.has_values(i)) {
      throw Error(concat("[forward] ", layer,
                         " may have changed a parameter only after it had run without doing so; this step is dropped, "
                         "the next ones take it into account"));
    }
    const auto [block, index] = state.parameters[i];
    throw written_parameter(layer, run.call->model->blocks[block].block->parameters()[index].name);
  }
}

void LayerRunner::save_buffers(JobRun& run, int l, int microbatch, std::vector<at::Tensor> before) {
  Call::BufferSnapshot snapshot;
  snapshot.produced = run.attempt->new_event();
  for (size_t i = 0; i < before.size(); ++i) snapshot.tensors.push_back(std::make_shared<memory::HostValue>());
  outbox_.send(
      run, Priority::kActivation,
      [tensors = snapshot.tensors, before = std::move(before), pinned = device_.wants_pinned_host_memory()] {
        std::vector<Piece> pieces;
        for (size_t i = 0; i < before.size(); ++i) {
          *tensors[i] = *memory::stage_download(before[i], false, pinned, pieces);
        }
        return pieces;
      },
      snapshot.produced);
  if (run.attempt->only_checks()) {
    run.own_snapshots[{l, microbatch}] = std::move(snapshot);
  } else {
    // An attempt that another one has replaced must leave that one's snapshot alone.
    run.attempt->read([&] { run.call->save_snapshot(l, microbatch, std::move(snapshot)); });
  }
}

void LayerRunner::restore_buffers(JobRun& run, int l, int microbatch) {
  const auto own = run.own_snapshots.find({l, microbatch});
  const auto snapshot = own != run.own_snapshots.end() ? std::optional(own->second) : run.call->snapshot(l, microbatch);
  if (!snapshot) return;
  LayerShell& layer = *shell(run, l).layer;
  EventPtr uploaded = run.attempt->new_event();
  std::vector<at::Tensor> targets;
  for (const at::Tensor& buffer : layer.buffers) targets.push_back(buffer.detach());
  EventPtr computed = run.attempt->new_event();
  device_.compute().signal(computed);
  upload_.submit({Priority::kActivation,
                  {run.attempt->follow(snapshot->produced), computed},
                  [targets, tensors = snapshot->tensors] {
                    std::vector<Piece> pieces;
                    for (size_t i = 0; i < targets.size(); ++i) pieces.push_back({targets[i], tensors[i]->data});
                    return pieces;
                  },
                  uploaded,
                  run.new_transfer()});
  uploaded->wait();
}

namespace {

// The places of values whose memory would be changed by a write to another value or to the weights.
std::vector<char> shared_places(const std::vector<at::Tensor>& values, const at::Tensor& weights) {
  std::vector<char> shared(values.size(), 0);
  for (size_t i = 0; i < values.size(); ++i) {
    shared[i] = memory::spans_overlap(values[i], weights);
    for (size_t j = 0; j < i; ++j)
      shared[i] |= !values[j].is_same(values[i]) && memory::spans_overlap(values[j], values[i]);
  }
  return shared;
}

bool any(const std::vector<char>& places) { return std::find(places.begin(), places.end(), 1) != places.end(); }

// The inputs of a layer, detached from the graph below: the same tensor twice stays one. `attached[i]`: its place in
// `boundary`, -1 for an input that needs no gradient or repeats an earlier one.
std::vector<at::Tensor> cut_off(const Flow& inputs, const std::vector<char>& copied, bool gradients,
                                torch_compat::Boundary& boundary, std::vector<int>& attached) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < inputs.tensors.size(); ++i) {
    const size_t same = memory::place_of(inputs.tensors[i], inputs.tensors);
    attached.push_back(-1);
    if (same < i) {
      tensors.push_back(tensors[same]);
      continue;
    }
    at::Tensor tensor = copied[i] ? memory::copy_alike(inputs.tensors[i]) : inputs.tensors[i].detach();
    if (gradients && inputs.requires_grad[i]) attached.back() = static_cast<int>(boundary.attach(tensor));
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

}  // namespace

Values LayerRunner::execute_watched(JobRun& run, int l, const Values& inputs, int microbatch, Use use,
                                    bool needs_copies, std::vector<char>& intact) {
  LayerState& state = run.layer(l);
  const std::vector<uint32_t> versions = versions_of(inputs.tensors, {});
  Values outputs = execute(run, l, inputs, microbatch, use);
  const std::vector<uint32_t> now = versions_of(inputs.tensors, {});
  intact.resize(now.size());
  for (size_t i = 0; i < now.size(); ++i) intact[i] = now[i] == versions[i];
  if (now != versions) {
    const bool late = run.habits(l).writes_inputs.exchange(Learned::kYes) == Learned::kNo;
    if (late && needs_copies) {
      throw Error(concat("[forward] layer ", l, " (", state.layer->name(),
                         ") wrote to its input only after it had run without doing so; this step is dropped, "
                         "the next ones take it into account"));
    }
  } else {
    Learned unknown = Learned::kUnknown;
    run.habits(l).writes_inputs.compare_exchange_strong(unknown, Learned::kNo);
  }
  return outputs;
}

std::vector<char> LayerRunner::copies_for(const JobRun& run, int l, const std::vector<char>& wanted) {
  const bool may_write = run.habits(l).writes_inputs.load() != Learned::kNo;
  return may_write ? wanted : std::vector<char>(wanted.size(), 0);
}

Flow LayerRunner::run_detached(JobRun& run, int l, const Flow& inputs, int microbatch, bool recompute, bool protect) {
  const bool gradients = run.call->requires_grad;
  const std::vector<char> to_copy =
      protect ? std::vector<char>(inputs.tensors.size(), 1) : shared_places(inputs.tensors, run.weights);
  torch_compat::Boundary boundary;
  std::vector<int> unused;
  Values values;
  values.structure = inputs.structure;
  values.tensors = cut_off(inputs, copies_for(run, l, to_copy), gradients, boundary, unused);
  std::vector<char> intact;
  Values outputs;
  {
    const at::AutoGradMode grad_mode(gradients);
    outputs = execute_watched(run, l, values, microbatch, {.recompute = recompute}, any(to_copy), intact);
  }

  const at::NoGradGuard no_grad;
  Flow flow;
  flow.structure = outputs.structure;
  for (size_t i = 0; i < outputs.tensors.size(); ++i) {
    const at::Tensor& output = outputs.tensors[i];
    const size_t same = memory::place_of(output, values.tensors);
    const size_t earlier = memory::place_of(output, outputs.tensors);
    if (same < values.tensors.size() && intact[same]) {
      // Passed on unchanged: it need not go to the host again.
      flow.tensors.push_back(inputs.tensors[same]);
      flow.requires_grad.push_back(inputs.requires_grad[same]);
      flow.host.push_back(inputs.host[same]);
    } else if (earlier < i) {
      flow.tensors.push_back(flow.tensors[earlier]);
      flow.requires_grad.push_back(flow.requires_grad[earlier]);
      flow.host.push_back(flow.host[earlier]);
    } else {
      // A buffer that the layer returns and also writes must not change while its value is still in flight.
      const bool changes =
          run.habits(l).writes_buffers.load() == Learned::kYes && memory::spans_overlap(output, run.weights);
      const at::Tensor value = memory::settled(output).detach();
      flow.tensors.push_back(changes ? memory::copy_alike(value) : value);
      flow.requires_grad.push_back(gradients && output.requires_grad());
      flow.host.push_back(nullptr);
    }
  }
  return flow;
}

namespace {

// The callback for a gradient that arrives at layer `l`: it seeds the generators, so that draws there do not depend on
// which layers the backward pass ran before. Autograd runs what is ready latest first, so all of the layers above has
// run by then, if one thread runs it.
std::function<void()> on_arrival(const JobRun& run, int l, int microbatch, const SegmentGraph& graph) {
  const bool seeds = run.call->options.preserve_rng_state;
  if (!seeds && !graph.clock && !graph.passed) return nullptr;
  const uint64_t seed = backward_seed(run.call->seed(l, microbatch));
  return [seeds, seed, clock = graph.clock, l, asks = std::weak_ptr(graph.passed)] {
    if (clock) clock->reached(l);
    if (const std::shared_ptr<const SegmentGraph::Passed> passed = asks.lock()) (*passed)(l);
    if (seeds) torch_compat::OwnGenerators::current()->seed(seed);
  };
}

}  // namespace

std::vector<at::Tensor> SegmentGraph::input_gradients() const {
  std::vector<at::Tensor> gradients;
  for (const int place : places) {
    gradients.push_back(place < 0 ? at::Tensor() : boundary.gradient(static_cast<size_t>(place)));
  }
  return gradients;
}

Values LayerRunner::run_graph(JobRun& run, schedule::Range layers, const Flow& inputs, int microbatch, bool recompute,
                              bool for_loss, SegmentGraph& graph) {
  if (times_layers(run, microbatch)) graph.clock = std::make_shared<BackwardClock>(device_.compute(), layers);
  // The loss follows the last layer, and may write to its arguments.
  const auto copies = [&](int l, const std::vector<char>& shared) {
    return l < layers.last ? copies_for(run, l, shared) : shared;
  };
  Values values;
  values.structure = inputs.structure;
  std::vector<char> shared = shared_places(inputs.tensors, run.weights);
  values.tensors = cut_off(inputs, copies(layers.first, shared), /*gradients=*/true, graph.boundary, graph.places);
  const at::AutoGradMode grad_mode(true);
  Together together(*this, run);
  for (int l = layers.first; l < layers.last; ++l) {
    std::vector<char> unused;
    const bool is_read = l + 1 < layers.last || for_loss;
    values = execute_watched(run, l, values, microbatch, {recompute, is_read}, any(shared), unused);
    if (!is_read) break;
    shared = shared_places(values.tensors, run.weights);
    values.tensors =
        torch_compat::cross_boundary(values.tensors, copies(l + 1, shared), on_arrival(run, l, microbatch, graph));
  }
  if (!for_loss) values.structure.reset();
  together.pause();
  return values;
}

}  // namespace roundpipe::runtime
