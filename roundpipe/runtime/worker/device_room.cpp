#include <roundpipe/runtime/worker/device_room.h>

#include <algorithm>
#include <utility>

#include <roundpipe/core/memory_rules.h>
#include <roundpipe/memory/host_arena.h>

namespace roundpipe::runtime {

using device::EventPtr;
using transfer::Piece;
using transfer::Priority;

void DeviceRoom::enqueued() {
  residents_.choose([this](const JobRun& run, const JobRun* before) { return work_bytes(run, before); });
  const auto& jobs = queue_.jobs();
  int64_t most_bytes = 0;
  const auto expect = [&](const JobRun& run, const JobRun& next) {
    const int64_t pair_bytes = run.layout.size_bytes + next.layout.size_bytes;
    const bool fits = fits_cap(pair_bytes + reserve_bytes(next, &run), device_.memory_limit_bytes());
    if (fits) most_bytes = std::max(most_bytes, pair_bytes);
  };
  for (size_t i = 0; i + 1 < jobs.size(); ++i) expect(*jobs[i], *jobs[i + 1]);
  // The last job of a step is followed by the first job of the next step, which is like that of this one.
  if (!jobs.empty()) expect(*jobs.back(), **std::ranges::find(jobs, jobs.back()->call, &JobRun::call));
  slots_.expect(most_bytes);
  prefetch();
  queue_.notify();
}

int64_t DeviceRoom::work_bytes(const JobRun& run, const JobRun* before) const {
  const int64_t known_bytes = run.call->model->work_bytes.load();
  if (known_bytes > 0) return known_bytes;
  auto bytes = static_cast<int64_t>(static_cast<double>(device_.memory_limit_bytes()) * kActivationShare);
  for (const JobRun* each : {before, &run}) {
    if (each != nullptr && each->job.phase != schedule::Phase::kForward) bytes += each->layout.gradient_bytes;
  }
  return bytes;
}

void DeviceRoom::prefetch() {
  const auto& jobs = queue_.jobs();
  for (size_t i = 0; i < std::min<size_t>(2, jobs.size()); ++i) {
    const std::shared_ptr<JobRun>& run = jobs[i];
    if (run->slot >= 0) {
      if (i == 0 && !queue_.runs()) stage_first(*run, kStagedMicrobatches);
      continue;
    }
    if (i > 0 && queue_.alone()) return;
    const JobRun* const before = i > 0 ? jobs[i - 1].get() : nullptr;
    run->slot = slots_.try_acquire(run->layout.size_bytes, reserve_bytes(*run, before));
    if (run->slot < 0) return;
    const int count = i == 0 ? kStagedMicrobatches : queue_.next_staged();
    // The thread here may have nothing to do with this job's call, so an error fails that call.
    const bool asked = run->attempt->succeeds([&] {
      residents_.upload(run);
      upload_weights(run);
    });
    if (!asked && !run->keeps()) run->weights_read->fire();
    run->attempt->succeeds([&] { stage_first(*run, count); });
  }
}

void DeviceRoom::stage_first(JobRun& run, int count) {
  const schedule::Range microbatches = run.job.microbatches;
  const int last = std::min(microbatches.first + count, microbatches.last);
  for (int microbatch = microbatches.first; microbatch < last; ++microbatch) staging_.stage(run, microbatch);
}

void DeviceRoom::stage_next(int count) {
  const MutexLock lock(queue_.mutex());
  queue_.set_next_staged(count);
  if (const std::shared_ptr<JobRun> next = queue_.prefetched()) stage_first(*next, count);
}

void DeviceRoom::upload_weights(const std::shared_ptr<JobRun>& run) {
  const auto& attempt = run->attempt;
  for (size_t i = 0; i < run->layout.layers.size(); ++i) run->layers_uploaded.push_back(attempt->new_event());
  run->uploaded->then([layers = run->layers_uploaded, uploaded = run->uploaded.get()] {
    const std::exception_ptr error = uploaded->error();
    for (const EventPtr& layer : layers) error ? layer->fail(error) : layer->fire();
  });
  std::vector<EventPtr> after;
  for (int l = run->job.layers.first; l < run->job.layers.last; ++l) {
    for (const size_t block : run->layer(l).blocks) {
      after.push_back(attempt->follow(run->call->readings[block]->published));
    }
    after.push_back(attempt->follow(run->buffers_before[run->place(l)]));
  }
  // Another attempt may have to read the weights again.
  const EventPtr read = run->keeps() ? run->new_transfer() : run->weights_read;
  upload_.submit({Priority::kWeight, std::move(after),
                  [this, run] {
                    queue_.admit(*run, run->uploaded, device_.name());
                    run->weights = slots_.buffer(run->slot, run->layout.size_bytes);
                    std::vector<Piece> pieces;
                    run->attempt->read([&] { pieces = weight_pieces(*run); });
                    return pieces;
                  },
                  run->uploaded, read});
}

std::vector<Piece> DeviceRoom::weight_pieces(JobRun& run) {
  std::vector<Piece> pieces;
  for (int l = run.job.layers.first; l < run.job.layers.last; ++l) {
    const LayerState& state = run.layer(l);
    const StageLayout::LayerPlace& place = run.layout.layers[run.place(l)];
    const size_t before = pieces.size();
    for (size_t i = 0; i < state.blocks.size(); ++i) {
      if (place.blocks_at[i] < 0) continue;
      const memory::WeightVersion& version = *run.call->readings[state.blocks[i]];
      const at::Tensor& flat = version.flat;
      if (flat.defined()) pieces.push_back({run.weights.narrow(0, place.blocks_at[i], flat.numel()), flat});
      const auto& layout = run.call->model->blocks[state.blocks[i]].block->layout();
      for (size_t p = 0; p < version.parts.size(); ++p) {
        pieces.push_back({layout.view(run.weights, p, place.blocks_at[i]), version.parts[p]});
      }
    }
    // A backward job restores the buffers of such a layer before each microbatch, from the snapshots of the forward.
    const bool saved =
        run.job.phase == schedule::Phase::kBackward && run.habits(l).writes_buffers.load() == Learned::kYes;
    for (size_t i = 0; i < state.buffers.size() && !saved; ++i) {
      const at::Tensor target = state.buffer_layout.view(run.weights, i, place.buffers_at);
      const auto old = run.old_buffers.find(l);
      const at::Tensor from = old != run.old_buffers.end() ? old->second[i] : state.buffers[i].tensor.detach();
      pieces.push_back({target, memory::staged_for(target, from, device_.wants_pinned_host_memory())});
    }
    const EventPtr& uploaded = run.layers_uploaded[run.place(l)];
    if (pieces.size() == before) {
      uploaded->fire();
    } else {
      pieces.back().arrived = uploaded;
    }
  }
  return pieces;
}

void DeviceRoom::arrive(const EventPtr& done, const EventPtr& part) {
  // Others may have to bring it first; a link that does not move is watched by itself.
  const Watch::Pause waiting(watch_);
  while (!upload_.wait(done, part)) {
    upload_.resume();
    if (upload_.wait(done, part)) break;
    if (!make_room()) upload_.cancel_aside(done);
  }
  part->wait();
}

void DeviceRoom::arrive_residents(const std::shared_ptr<JobRun>& run) {
  do {
    for (const auto& [block, resident] : run->residents) arrive(resident.arrived);
  } while (residents_.renew(run));
}

Flow DeviceRoom::take(JobRun& run, int microbatch) {
  arrive(run.staged.at(microbatch).inputs->uploaded);
  return staging_.take(run, microbatch);
}

std::vector<at::Tensor> DeviceRoom::take(StagedValues& staged) {
  arrive(staged.uploaded);
  return staging_.take(staged);
}

bool DeviceRoom::make_room() {
  const std::shared_ptr<JobRun> running = queue_.running();
  bool made = running->wait_sent();
  made |= queue_.wait_released();
  if (residents_.give_way()) return true;
  made |= park_next();
  return leave_arena(running) || made;
}

bool DeviceRoom::park_next() {
  const auto [next, begun] = queue_.run_alone();
  const bool had_idle = slots_.drop_idle();
  if (!next) return had_idle;
  // It has a slot, so it stays the next job, and no other thread touches it until the running job is over: from here on
  // this thread uses it without the lock. Its transfers only copy, so they end, or wait because they found no memory.
  for (const EventPtr& done : begun) upload_.wait(done);
  bool had_leftover = false;
  if (!next->weights.defined()) {
    // Memory that the slot's previous job has left there.
    had_leftover = slots_.drop(next->slot);
  } else if (next->uploaded->complete() && !next->uploaded->error() && next->weights.numel() > 0) {
    if (park_weights(next)) {
      slots_.drop(next->slot);
      unpark_weights(next);
    }
  }
  const bool had_residents = residents_.park(next);
  for (const auto& [microbatch, staged] : next->staged) staging_.stage_again(*next, microbatch);
  return had_idle || had_leftover || had_residents || !begun.empty();
}

bool DeviceRoom::leave_arena(const std::shared_ptr<JobRun>& running) {
  if (!slots_.together() || running->attempt->error() || moving_ == Moving::kNever) return false;
  {
    // The next job's weights may still be there, if the host had no memory for them.
    const MutexLock lock(queue_.mutex());
    const std::shared_ptr<JobRun> next = queue_.jobs().size() >= 2 ? queue_.jobs()[1] : nullptr;
    if (next && next->weights.defined() && next->weights.numel() > 0) return false;
  }
  if (!running->weights.defined() || running->weights.numel() == 0) return slots_.separate();
  if (moving_ == Moving::kLater) return true;
  arrive(running->uploaded);
  device_.compute().mark()->wait_complete();
  layers_.unbind();
  if (park_weights(running)) {
    slots_.separate();
    unpark_weights(running);
    arrive(running->uploaded);
  }
  layers_.bind(*running);
  return !slots_.together();
}

bool DeviceRoom::park_weights(const std::shared_ptr<JobRun>& run) {
  const EventPtr parked = run->attempt->new_event();
  const EventPtr settled = run->new_transfer();
  download_.submit({Priority::kWeight,
                    {},
                    [run, pinned = device_.wants_pinned_host_memory()] {
                      memory::HostArena& arena =
                          pinned ? memory::HostArena::page_locked() : memory::HostArena::pageable();
                      run->parked = arena.allocate(run->weights.numel());
                      return std::vector<Piece>{{run->parked, run->weights}};
                    },
                    parked,
                    settled});
  // Not `parked`: it fails as soon as the call does, while the link may still be reading.
  settled->wait_complete();
  if (parked->error()) {
    run->parked.reset();
    // The host had no memory for them, so they stay where they are. If the attempt has failed, nothing needs its
    // weights.
    if (!run->attempt->error()) return false;
  }
  run->weights.reset();
  return true;
}

void DeviceRoom::unpark_weights(const std::shared_ptr<JobRun>& run) {
  run->uploaded = run->attempt->new_event();
  std::ranges::fill(run->layers_uploaded, run->uploaded);
  upload_.submit({Priority::kWeight,
                  {},
                  [this, run] {
                    queue_.admit(*run, run->uploaded, device_.name());
                    run->weights = slots_.buffer(run->slot, run->layout.size_bytes);
                    const at::Tensor from = std::exchange(run->parked, {});
                    return std::vector<Piece>{{run->weights.narrow(0, 0, from.numel()), from}};
                  },
                  run->uploaded,
                  run->new_transfer()});
}

void DeviceRoom::release(const std::shared_ptr<JobRun>& run) {
  if (run->attempt->error()) residents_.doubt(*run);
  EventPtr computed;
  {
    const auto scope = device_.compute().enter();
    run->staged.clear();
    computed = device_.compute().mark();
  }
  std::vector<EventPtr> pending = std::move(run->transfers);
  run->transfers.clear();
  if (!run->keeps()) pending.push_back(run->weights_read);
  pending.push_back(computed);
  {
    const MutexLock lock(queue_.mutex());
    queue_.pop();
    prefetch();
  }
  upload_.resume();
  device::when_all(pending, [this, run] {
    const bool over = run->finish();
    run->weights.reset();
    const CallPtr call = run->call;
    // Before the lock is taken: it may write all over the slot.
    slots_.release(run->slot);
    residents_.release(*run);
    {
      const MutexLock lock(queue_.mutex());
      queue_.released(run, over);
      prefetch();
      upload_.resume();
      // Under the lock: as soon as it is free, a destructor that waits for this may go on.
      queue_.notify();
    }
    if (over) call->job_over();
  });
}

}  // namespace roundpipe::runtime
