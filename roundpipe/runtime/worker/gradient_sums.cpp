#include <roundpipe/runtime/worker/gradient_sums.h>

#include <algorithm>
#include <iterator>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <roundpipe/runtime/model/out_of_memory.h>
#include <roundpipe/runtime/step/update_thread.h>

namespace roundpipe::runtime {

using device::EventPtr;
using transfer::Piece;
using transfer::Priority;

at::Tensor GradientSums::allocate(int64_t size_bytes, bool may_wait) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(device_.torch_device());
  at::Tensor flat;
  while (const std::exception_ptr error = out_of_memory_in([&] { flat = at::empty({size_bytes}, options); })) {
    if (!may_wait) return {};
    if (!room_.make_room()) std::rethrow_exception(error);
  }
  return flat;
}

void GradientSums::begin_microbatch(JobRun& run, bool again) {
  for (int l = run.job.layers.first; l < run.job.layers.last; ++l) {
    GradientSink& sink = layers_.shell(run, l).sink;
    if (again) {
      sink.retry();
    } else {
      sink.begin_microbatch();
    }
  }
}

bool GradientSums::can_run_again(JobRun& run) {
  for (int l = run.job.layers.first; l < run.job.layers.last; ++l) {
    if (!layers_.shell(run, l).sink.can_retry()) return false;
  }
  return true;
}

void GradientSums::begin(JobRun& run) {
  const at::NoGradGuard no_grad;
  sums_.clear();
  std::vector<EventPtr> arrived;
  std::vector<std::function<void()>> spread;
  for (int l = run.job.layers.first; l < run.job.layers.last; ++l) {
    const LayerState& state = run.layer(l);
    layers_.shell(run, l).sink.reset(state.parameters.size());
    for (const size_t block : state.blocks) {
      if (is_summed_here(*run.call, block)) begin_sum(run, l, block, arrived, spread);
    }
  }
  for (size_t i = 0; i < arrived.size(); ++i) {
    room_.arrive(arrived[i]);
    spread[i]();
  }
}

bool GradientSums::is_summed_here(const Call& call, size_t block) {
  return call.results[block] && !call.tied_sums[block];
}

bool GradientSums::is_joined(const Call& call, size_t block) {
  return call.model->blocks[block].tied() && is_summed_here(call, block) && !call.block_sums[block];
}

void GradientSums::begin_sum(JobRun& run, int layer, size_t own, std::vector<EventPtr>& arrived,
                             std::vector<std::function<void()>>& spread) {
  const Call& call = *run.call;
  const LayerState& state = run.layer(layer);
  GradientSink& sink = layers_.shell(run, layer).sink;
  const BlockState& shared = call.model->blocks[own];
  const memory::BlockLayout& host_layout = shared.gradient_layout;
  Sum& sum = sums_.emplace_back();
  sum.layer = layer;
  sum.block = own;
  sum.sink = &sink;
  sum.layout = host_layout.widened();
  take_up(run, sum);
  // The sum continues from that of earlier calls, so that bits are those of one loop over all microbatches. Where
  // layers share the block, that one comes last.
  const memory::GradientBlockPtr base = call.bases[own];
  const bool joined = is_joined(call, own);
  if (!base || run.job.microbatches.first != 0) return;
  if (shared.tied() && !(joined && layer == shared.layers.front())) return;
  auto uploaded = std::make_shared<at::Tensor>();
  EventPtr done = run.attempt->new_event();
  upload_.submit({Priority::kBoundaryGradient,
                  {run.attempt->follow(base->landed)},
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
  spread.push_back([this, &state, &sink, &sum, &host_layout, base, uploaded, joined] {
    if (!uploaded->defined()) return;
    device_.compute().uses(*uploaded);
    if (joined) {
      sum.base = base;
      sum.base_flat = *uploaded;
      return;
    }
    for (size_t i = 0; i < state.parameters.size(); ++i) {
      const auto [block, index] = state.parameters[i];
      if (block != sum.block || !base->received[index]) continue;
      sum.layout.view(sum.flat, index).copy_(host_layout.view(*uploaded, index));
      sink.received[i] = 1;
    }
  });
}

// Gives the layer new memory to sum in.
void GradientSums::take_up(const JobRun& run, Sum& sum) {
  const LayerState& state = run.layer(sum.layer);
  const std::vector<char>& trainable = run.call->trainable[static_cast<size_t>(sum.layer)];
  sum.flat = allocate(sum.layout.size_bytes);
  for (size_t i = 0; i < state.parameters.size(); ++i) {
    if (state.parameters[i].block != sum.block || !trainable[i]) continue;
    sum.sink->targets[i] = sum.layout.view(sum.flat, state.parameters[i].index);
    sum.sink->received[i] = 0;
  }
}

namespace {

// Runs `work` once the sums of earlier calls have landed, which may be after the job that asks for it is over. The call
// is not finished before that. REQUIRES: a job of the call is left.
void once_landed(const CallPtr& call, const memory::GradientBlockPtr& base, std::function<void()> work) {
  call->then({base ? base->landed : nullptr}, [hold = call->hold(), work = std::move(work)] { work(); });
}

// Adds up the parts of a block on the update thread. REQUIRES: a job of the call is left.
void add_up(const CallPtr& call, size_t block) {
  once_landed(call, call->block_sums[block]->target().base, [call, block] {
    const auto work = [call, block, hold = call->hold()] { call->attempt([&] { call->block_sums[block]->add_up(); }); };
    UpdateThread::Work prepared = UpdateThread::prepare({0, UpdateThread::Kind::kNorm, block}, work);
    if (!UpdateThread::instance().submit(prepared)) work();
  });
}

}  // namespace

void GradientSums::contribute_tied(JobRun& run, int microbatch, bool ran) {
  const Call& call = *run.call;
  for (int l = run.job.layers.first; l < run.job.layers.last; ++l) {
    const LayerState& state = run.layer(l);
    GradientSink& sink = layers_.shell(run, l).sink;
    for (const size_t block : state.blocks) {
      const BlockState& shared = call.model->blocks[block];
      if (!call.results[block] || is_summed_here(call, block)) continue;
      std::vector<Piece> pieces;
      std::vector<size_t> indices;
      for (size_t i = 0; i < state.parameters.size(); ++i) {
        if (state.parameters[i].block != block || !ran || !sink.tied[i].defined()) continue;
        pieces.push_back({at::Tensor(), std::move(sink.tied[i])});
        indices.push_back(state.parameters[i].index);
        sink.tied[i].reset();
      }
      auto landed = std::make_shared<std::vector<at::Tensor>>(shared.gradient_layout.tensors.size());
      EventPtr done = run.attempt->new_event();
      outbox_.send(
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
      const auto place = static_cast<size_t>(microbatch);
      const size_t sharer = shared.sharer(l);
      const JobResult result{JobResult::Kind::kTiedGradient, l, block, microbatch};
      run.attempt->then({done}, [attempt = run.attempt, result, call_ptr = run.call, block, sharer, place, landed] {
        if (!attempt->claim(result, [landed] { return *landed; })) return;
        once_landed(call_ptr, call_ptr->bases[block], [call_ptr, block, sharer, place, landed] {
          call_ptr->tied_sums[block]->contribute(sharer, place, std::move(*landed));
        });
      });
    }
  }
}

void GradientSums::end_group(JobRun& run, int microbatch) {
  const schedule::GradientGroups groups = run.call->groups();
  if (microbatch + 1 == run.job.microbatches.last || !groups.is_boundary(microbatch + 1)) return;
  const at::NoGradGuard no_grad;
  for (Sum& sum : sums_) {
    if (run.job.microbatches.first == 0) {
      add_to_total(run, sum);
    } else {
      const int group = groups.group_of(microbatch);
      send(run, sum, {group, group + 1}, /*may_wait=*/true);
    }
    if (!sum.flat.defined()) take_up(run, sum);
  }
}

namespace {

// Adds the sums of a block's parameters in `terms` that are `received` to those in `total`.
void add_terms(const memory::BlockLayout& layout, const at::Tensor& total, std::vector<char>& in_total,
               const memory::BlockLayout& term_layout, const at::Tensor& terms, const std::vector<char>& received) {
  for (size_t i = 0; i < received.size(); ++i) {
    if (!received[i]) continue;
    at::Tensor sum = layout.view(total, i);
    if (in_total[i]) {
      sum.add_(term_layout.view(terms, i));
    } else {
      sum.copy_(term_layout.view(terms, i));
    }
    in_total[i] = 1;
  }
}

}  // namespace

void GradientSums::add_to_total(JobRun& run, Sum& sum) {
  const std::vector<char> group = received(run, sum);
  if (sum.total.defined()) {
    add_terms(sum.layout, sum.total, sum.in_total, sum.layout, sum.flat, group);
  } else {
    sum.total = std::exchange(sum.flat, {});
    sum.in_total = group;
  }
  const std::vector<LayerState::ParameterPlace>& places = run.layer(sum.layer).parameters;
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i].block == sum.block) sum.sink->received[i] = 0;
  }
}

std::vector<char> GradientSums::received(const JobRun& run, const Sum& sum) {
  std::vector<char> received(sum.layout.tensors.size(), 0);
  const std::vector<LayerState::ParameterPlace>& places = run.layer(sum.layer).parameters;
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i].block == sum.block) received[places[i].index] = sum.sink->received[i];
  }
  return received;
}

std::vector<char> GradientSums::complete(const JobRun& run, const Sum& sum) {
  return sum.in_total.empty() ? received(run, sum) : sum.in_total;
}

bool GradientSums::join(const JobRun& run, Sum& last) {
  if (last.is_joined) return true;
  std::vector<Sum*> sharers;
  for (Sum& sum : sums_) {
    if (sum.block != last.block) continue;
    if (&sum != &last && !sum.has_left) return false;
    sharers.push_back(&sum);
  }
  // From the last layer to the first, then what was before, as BlockSum does.
  at::Tensor total = std::exchange(sharers.back()->flat, {});
  std::vector<char> in_total = complete(run, *sharers.back());
  for (auto sum = std::next(sharers.rbegin()); sum != sharers.rend(); ++sum) {
    add_terms(last.layout, total, in_total, (*sum)->layout, (*sum)->flat, complete(run, **sum));
    (*sum)->flat.reset();
  }
  Sum& lowest = *sharers.front();
  if (lowest.base) {
    const memory::BlockLayout& layout = run.call->model->blocks[last.block].gradient_layout;
    add_terms(last.layout, total, in_total, layout, lowest.base_flat, lowest.base->received);
    lowest.base_flat.reset();
  }
  last.flat = std::move(total);
  last.in_total = std::move(in_total);
  last.is_joined = true;
  return true;
}

void GradientSums::passed(JobRun& run, int microbatch, int lowest) {
  for (Sum& sum : sums_) {
    if (sum.layer < lowest || sum.has_left) continue;
    sum.sink->pass();
    const bool in_time = run.habits(sum.layer).late_gradients.load() == Learned::kNo;
    if (in_time && microbatch + 1 == run.job.microbatches.last) send_early(run, sum);
  }
}

void GradientSums::over(JobRun& run, int microbatch, int lowest) {
  if (microbatch + 1 < run.job.microbatches.last) return;
  for (Sum& sum : sums_) {
    if (sum.layer >= lowest && !sum.has_left) send_early(run, sum);
  }
}

void GradientSums::learn(JobRun& run) {
  for (const Sum& sum : sums_) {
    std::atomic<Learned>& late = run.habits(sum.layer).late_gradients;
    if (sum.sink->came_late()) late.store(Learned::kYes);
    Learned unknown = Learned::kUnknown;
    if (sum.sink->is_passed()) late.compare_exchange_strong(unknown, Learned::kNo);
  }
}

void GradientSums::send_early(JobRun& run, Sum& sum) {
  const at::NoGradGuard no_grad;
  const std::vector<LayerState::ParameterPlace>& places = run.layer(sum.layer).parameters;
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i].block == sum.block) sum.sink->close(i);
  }
  send_last(run, sum, /*may_wait=*/false);
}

void GradientSums::send(JobRun& run) {
  const at::NoGradGuard no_grad;
  for (Sum& sum : sums_) {
    if (!sum.has_left) send_last(run, sum, /*may_wait=*/true);
  }
  drop(run);
}

bool GradientSums::send_last(JobRun& run, Sum& sum, bool may_wait) {
  const schedule::Range groups = run.call->groups().groups_of(run.job.microbatches);
  if (sum.total.defined()) {
    add_to_total(run, sum);
    sum.flat = std::exchange(sum.total, {});
  }
  if (is_joined(*run.call, sum.block) && !join(run, sum)) {
    sum.has_left = true;
    return true;
  }
  const bool first = run.job.microbatches.first == 0;
  sum.has_left = send(run, sum, first ? groups : schedule::Range{groups.last - 1, groups.last}, may_wait);
  return sum.has_left;
}

bool GradientSums::send(JobRun& run, Sum& sum, schedule::Range groups, bool may_wait) {
  Call& call = *run.call;
  const BlockState& shared = call.model->blocks[sum.block];
  // Parts are rounded after they have been added.
  const bool whole = !call.block_sums[sum.block];
  const memory::BlockLayout& layout = whole ? shared.gradient_layout : sum.layout;
  const std::vector<char> received = complete(run, sum);
  at::Tensor rounded;
  if (!sum.layout.same_dtypes(layout)) {
    rounded = allocate(layout.size_bytes, may_wait);
    if (!rounded.defined()) return false;
  }
  at::Tensor sent = std::exchange(sum.flat, {});
  if (rounded.defined()) {
    for (size_t index = 0; index < received.size(); ++index) {
      if (received[index]) layout.view(rounded, index).copy_(sum.layout.view(sent, index));
    }
    sent = rounded;
  }
  const bool any = std::ranges::find(received, 1) != received.end();
  auto landed = std::make_shared<at::Tensor>();
  EventPtr done = run.attempt->new_event();
  memory::GradientRoom::SharePtr share;
  if (any && call.model->gradient_room)
    share = call.model->gradient_room->ask((whole ? shared.gradient_layout : shared.sum_layout).size_bytes);
  outbox_.send(
      run, Priority::kParameterGradient,
      [sent, any, landed, buffers = whole ? shared.gradient_buffers : shared.sum_buffers] {
        std::vector<Piece> pieces;
        if (!any) return pieces;
        *landed = buffers->take();
        pieces.push_back({*landed, sent});
        return pieces;
      },
      done, share ? share->granted() : nullptr);
  const int layer = sum.is_joined ? shared.layers.front() : sum.layer;
  const JobResult delivered{JobResult::Kind::kSum, layer, sum.block, groups.first};
  run.attempt->then({done}, [attempt = run.attempt, delivered, call_ptr = run.call, block = sum.block,
                             sharer = shared.sharer(sum.layer), groups, landed, received, whole, share,
                             &sent_layout = whole ? shared.gradient_layout : shared.sum_layout] {
    // Bytes between the gradients, and those of parameters without one, mean nothing.
    const auto contents = [&] {
      std::vector<at::Tensor> gradients(received.size());
      for (size_t i = 0; i < received.size(); ++i) {
        if (received[i]) gradients[i] = sent_layout.view(*landed, i);
      }
      return gradients;
    };
    if (!attempt->claim(delivered, contents)) {
      landed->reset();
      if (share) share->give_back();
      return;
    }
    if (whole) {
      const memory::GradientBlockPtr& result = call_ptr->results[block];
      result->flat = std::move(*landed);
      result->received = received;
      result->share = share;
      result->landed->fire();
      if (share) share->arrived();
    } else if (call_ptr->block_sums[block]->add(sharer, groups, std::move(*landed), received, share)) {
      add_up(call_ptr, block);
    } else if (share) {
      share->arrived();
    }
  });
  return true;
}

void GradientSums::drop(JobRun& run) {
  for (const Sum& sum : sums_) {
    // Of a microbatch that failed, nothing else is known.
    if (sum.sink->came_late()) run.habits(sum.layer).late_gradients.store(Learned::kYes);
    sum.sink->reset(run.layer(sum.layer).parameters.size());
  }
  sums_.clear();
}

}  // namespace roundpipe::runtime
