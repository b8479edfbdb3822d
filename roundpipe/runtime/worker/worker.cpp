#include <roundpipe/runtime/worker/worker.h>

#include <algorithm>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/memory/host_arena.h>
#include <roundpipe/runtime/model/out_of_memory.h>

namespace roundpipe::runtime {

using device::EventPtr;
using transfer::Piece;
using transfer::Priority;

Worker::Worker(int index, std::unique_ptr<device::Device> device)
    : index_(index),
      device_(std::move(device)),
      upload_(device_->upload(), device_->link_options()),
      download_(device_->download(), device_->link_options()),
      slots_(*device_),
      runner_(
          index, *device_, upload_, download_, shells_,
          [this](const JobRun& run, const EventPtr& done) { admit(run, done); }, [this] { return make_room(); },
          [this](int count) { stage_next(count); }),
      thread_([this] { loop(); }) {}

void Worker::stop() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
  upload_.stop();
  download_.stop();
  shells_.clear();
  slots_.drop_idle();
}

bool Worker::look(const ModelState& model, double& begun) const {
  bool alone = true;
  for (const std::shared_ptr<JobRun>& run : queue_) {
    if (run->call->model.get() != &model) {
      alone = false;
    } else if (run->slot >= 0) {
      begun = std::max(begun, run->position);
    }
  }
  return alone;
}

void Worker::enqueue(std::shared_ptr<JobRun> run, double begun) {
  auto place = queue_.end();
  while (place != queue_.begin()) {
    const JobRun& before = **std::prev(place);
    if (before.slot >= 0 || before.position <= begun || before.position <= run->position) break;
    --place;
  }
  queue_.insert(place, std::move(run));
}

void Worker::enqueued() {
  int64_t most_bytes = 0;
  const auto expect = [&](const JobRun& run, const JobRun& next) {
    const int64_t limit_bytes = device_->memory_limit_bytes();
    const int64_t pair_bytes = run.layout.size_bytes + next.layout.size_bytes;
    const bool fits = limit_bytes == 0 || pair_bytes + reserve_bytes(next, &run) <= limit_bytes;
    if (fits) most_bytes = std::max(most_bytes, pair_bytes);
  };
  for (size_t i = 0; i + 1 < queue_.size(); ++i) expect(*queue_[i], *queue_[i + 1]);
  // The last job of a step is followed by the first one of the next, which is like it.
  if (!queue_.empty()) expect(*queue_.back(), **std::ranges::find(queue_, queue_.back()->call, &JobRun::call));
  slots_.expect(most_bytes);
  prefetch();
  changed_.notify_all();
}

int64_t Worker::reserve_bytes(const JobRun& run, const JobRun* before) const {
  const int64_t known_bytes = run.call->model->work_bytes.load();
  if (known_bytes > 0) return known_bytes;
  // Of the cap, so much is left to activations beside the weights of two stages, or an idle slot is given up.
  constexpr double kActivationShare = 0.4;
  auto bytes = static_cast<int64_t>(static_cast<double>(device_->memory_limit_bytes()) * kActivationShare);
  for (const JobRun* each : {before, &run}) {
    if (each != nullptr && each->job.phase != schedule::Phase::kForward) bytes += each->layout.gradient_bytes;
  }
  return bytes;
}

void Worker::prefetch() {
  for (size_t i = 0; i < std::min<size_t>(2, queue_.size()); ++i) {
    const std::shared_ptr<JobRun>& run = queue_[i];
    if (run->slot >= 0) {
      if (i == 0 && !running_) stage(*run, JobRunner::kStaged);
      continue;
    }
    if (i > 0 && alone_) return;
    const JobRun* const before = i > 0 ? queue_[i - 1].get() : nullptr;
    run->slot = slots_.try_acquire(run->layout.size_bytes, reserve_bytes(*run, before));
    if (run->slot < 0) return;
    // Whoever is here may have nothing to do with this job's call, so what goes wrong is that call's.
    const bool asked = run->call->attempt([&] { upload_weights(run); });
    if (!asked) run->weights_read->fire();
    run->call->attempt([&] { stage(*run, i == 0 ? JobRunner::kStaged : next_staged_); });
  }
}

void Worker::stage(JobRun& run, int count) {
  const schedule::Range microbatches = run.job.microbatches;
  const int last = std::min(microbatches.first + count, microbatches.last);
  for (int microbatch = microbatches.first; microbatch < last; ++microbatch) runner_.staging().stage(run, microbatch);
}

void Worker::stage_next(int count) {
  const std::lock_guard lock(mutex_);
  next_staged_ = count;
  if (queue_.size() > 1 && queue_[1]->slot >= 0) stage(*queue_[1], count);
}

void Worker::upload_weights(const std::shared_ptr<JobRun>& run) {
  std::vector<EventPtr> after;
  for (int l = run->job.layers.first; l < run->job.layers.last; ++l) {
    for (const size_t block : run->layer(l).blocks) after.push_back(run->call->readings[block]->published);
    after.push_back(run->buffers_before[run->place(l)]);
  }
  upload_.submit({Priority::kWeight, std::move(after),
                  [this, run] {
                    admit(*run, run->uploaded);
                    std::vector<Piece> pieces;
                    run->weights = slots_.buffer(run->slot, run->layout.size_bytes);
                    for (int l = run->job.layers.first; l < run->job.layers.last; ++l) {
                      const LayerState& state = run->layer(l);
                      const StageLayout::LayerPlace& place = run->layout.layers[run->place(l)];
                      for (size_t i = 0; i < state.blocks.size(); ++i) {
                        const memory::WeightVersion& version = *run->call->readings[state.blocks[i]];
                        const at::Tensor& flat = version.flat;
                        if (flat.defined()) {
                          pieces.push_back({run->weights.narrow(0, place.blocks_at[i], flat.numel()), flat});
                        }
                        const auto& layout = run->call->model->blocks[state.blocks[i]].block->layout();
                        for (size_t p = 0; p < version.parts.size(); ++p) {
                          pieces.push_back({layout.view(run->weights, p, place.blocks_at[i]), version.parts[p]});
                        }
                      }
                      // A backward job gets what such a layer had before its forward, microbatch by microbatch.
                      const bool saved = run->job.phase == schedule::Phase::kBackward &&
                                         run->habits(l).writes_buffers.load() == Learned::kYes;
                      for (size_t i = 0; i < state.buffers.size() && !saved; ++i) {
                        const at::Tensor target = state.buffer_layout.view(run->weights, i, place.buffers_at);
                        pieces.push_back({target, memory::staged_for(target, state.buffers[i].tensor.detach(),
                                                                     device_->wants_pinned_host_memory())});
                      }
                    }
                    return pieces;
                  },
                  run->uploaded, run->weights_read});
}

namespace {

// torch sets the number of threads for the calling thread and, as the default of later ones, for the process.
void use_threads(int threads) {
  if (threads == 0) return;
  const int process_threads = at::get_num_threads();
  at::set_num_threads(threads);
  std::thread([process_threads] { at::set_num_threads(process_threads); }).join();
}

std::function<std::shared_ptr<void>()>& thread_attach() {
  static std::function<std::shared_ptr<void>()> attach;
  return attach;
}

}  // namespace

void set_thread_attach(std::function<std::shared_ptr<void>()> attach) { thread_attach() = std::move(attach); }

void Worker::loop() {
  const std::shared_ptr<void> attached = thread_attach() ? thread_attach()() : nullptr;
  use_threads(device_->threads());
  become_device_thread();
  while (true) {
    std::shared_ptr<JobRun> run;
    {
      std::unique_lock lock(mutex_);
      running_ = false;
      changed_.wait(lock, [this] { return queue_.empty() ? stopping_ && releasing_ == 0 : queue_.front()->slot >= 0; });
      if (queue_.empty()) return;
      run = queue_.front();
      running_ = true;
    }
    // What the job before sends is gone before this one takes memory, so that peaks do not depend on timing.
    if (device_->copies_on_compute_cores()) wait_released();
    execute(*run);
    if (is_left_behind()) {
      // The user's code has forked, and this thread is all of the child. It ends, and with it the process; what belongs
      // to the interpreter stays.
      static_cast<void>(new std::shared_ptr<void>(attached));
      return;
    }
    release(run);
  }
}

void Worker::execute(JobRun& run) {
  if (run.call->failed()) return;
  // A thread learns of torch's number of threads by its first parallel loop; a matrix product before it would use all
  // cores, and sum in another order.
  if (device_->threads() == 0) at::init_num_threads();
  try {
    const auto scope = device_->compute().enter();
    const at::ThreadLocalStateGuard state(*run.call->thread_state);
    run.call->autocast.apply();
    const torch_compat::OwnGenerators::Scope generators(generators_);
    runner_.run(run);
  } catch (...) {
    clear_error();
    if (!is_left_behind()) run.call->fail(std::current_exception());
  }
  at::autocast::set_autocast_enabled(at::kCPU, false);
  if (!device_->is_virtual()) at::autocast::set_autocast_enabled(device_->torch_device().type(), false);
}

void Worker::admit(const JobRun& run, const EventPtr& done) {
  const std::lock_guard lock(mutex_);
  const bool runs = !queue_.empty() && queue_.front().get() == &run;
  if (runs) return;
  TORCH_CHECK_WITH(OutOfMemoryError, !alone_, "[", device_->name(), "] the running job needs all memory for now");
  for (const std::shared_ptr<JobRun>& waiting : queue_) {
    if (waiting.get() == &run) waiting->begun.push_back(done);
  }
}

bool Worker::make_room() {
  std::shared_ptr<JobRun> running;
  {
    std::lock_guard lock(mutex_);
    running = queue_.front();
  }
  bool made = running->wait_sent();
  made |= wait_released();
  made |= park_next();
  return leave_arena(running) || made;
}

bool Worker::wait_released() {
  std::unique_lock lock(mutex_);
  if (releasing_ == 0) return false;
  changed_.wait(lock, [this] { return releasing_ == 0; });
  return true;
}

bool Worker::park_next() {
  std::shared_ptr<JobRun> next;
  std::vector<EventPtr> begun;
  {
    const std::lock_guard lock(mutex_);
    alone_ = true;
    if (queue_.size() >= 2 && queue_[1]->slot >= 0) {
      next = queue_[1];
      begun = std::exchange(next->begun, {});
    }
  }
  const bool had_idle = slots_.drop_idle();
  if (!next) return had_idle;
  // It has a slot, so it stays the next one, and nobody else looks at it until the running job is over: from here on
  // it is this thread's, without the lock. Its transfers only copy, so they end, or found no memory and stand aside.
  for (const EventPtr& done : begun) upload_.wait(done);
  bool had_leftover = false;
  if (!next->weights.defined()) {
    // What the job before it has left in the slot.
    had_leftover = slots_.drop(next->slot);
  } else if (next->uploaded->complete() && !next->uploaded->error() && next->weights.numel() > 0) {
    if (park_weights(next)) {
      slots_.drop(next->slot);
      unpark_weights(next);
    }
  }
  for (const auto& [microbatch, staged] : next->staged) runner_.staging().stage_again(*next, microbatch);
  return had_idle || had_leftover || !begun.empty();
}

bool Worker::leave_arena(const std::shared_ptr<JobRun>& running) {
  if (!slots_.together() || running->call->failed() || runner_.moving() == JobRunner::Moving::kNever) return false;
  {
    // The next job's weights may be there still: the host had no memory for them.
    const std::lock_guard lock(mutex_);
    if (queue_.size() >= 2 && queue_[1]->weights.defined() && queue_[1]->weights.numel() > 0) return false;
  }
  if (!running->weights.defined() || running->weights.numel() == 0) return slots_.separate();
  if (runner_.moving() == JobRunner::Moving::kLater) return true;
  device_->compute().mark()->wait_complete();
  runner_.unbind();
  if (park_weights(running)) {
    slots_.separate();
    unpark_weights(running);
    runner_.staging().arrive(running->uploaded);
  }
  runner_.bind(*running);
  return !slots_.together();
}

bool Worker::park_weights(const std::shared_ptr<JobRun>& run) {
  EventPtr parked = run->call->new_event();
  const EventPtr settled = run->new_transfer();
  download_.submit({Priority::kWeight,
                    {},
                    [run, pinned = device_->wants_pinned_host_memory()] {
                      memory::HostArena& arena =
                          pinned ? memory::HostArena::page_locked() : memory::HostArena::pageable();
                      run->parked = arena.allocate(run->weights.numel());
                      return std::vector<Piece>{{run->parked, run->weights}};
                    },
                    parked,
                    settled});
  // Not for `parked`: when the call fails it does so at once, and the link may still be reading.
  settled->wait_complete();
  if (parked->error()) {
    run->parked.reset();
    // The host had no memory for them, so they stay where they are. The weights of a call that failed nobody needs.
    if (!run->call->failed()) return false;
  }
  run->weights.reset();
  return true;
}

void Worker::unpark_weights(const std::shared_ptr<JobRun>& run) {
  run->uploaded = run->call->new_event();
  upload_.submit({Priority::kWeight,
                  {},
                  [this, run] {
                    admit(*run, run->uploaded);
                    run->weights = slots_.buffer(run->slot, run->layout.size_bytes);
                    const at::Tensor from = std::exchange(run->parked, {});
                    return std::vector<Piece>{{run->weights.narrow(0, 0, from.numel()), from}};
                  },
                  run->uploaded,
                  run->new_transfer()});
}

void Worker::release(const std::shared_ptr<JobRun>& run) {
  EventPtr computed;
  {
    const auto scope = device_->compute().enter();
    run->staged.clear();
    computed = device_->compute().mark();
  }
  std::vector<EventPtr> pending = std::move(run->transfers);
  run->transfers.clear();
  pending.push_back(run->weights_read);
  pending.push_back(computed);
  {
    std::lock_guard lock(mutex_);
    ++releasing_;
    queue_.pop_front();
    alone_ = false;
    next_staged_ = 0;
    running_ = false;
    prefetch();
  }
  upload_.resume();
  device::when_all(pending, [this, run] {
    for (const EventPtr& after : run->buffers_after) {
      if (after && !after->complete()) after->fire();
    }
    run->weights.reset();
    const CallPtr call = run->call;
    // Before the lock: it may write all over the slot.
    slots_.release(run->slot);
    {
      std::lock_guard lock(mutex_);
      --releasing_;
      prefetch();
      upload_.resume();
      // Under the lock: once it is free, a stopping destructor may be through.
      changed_.notify_all();
    }
    call->job_over();
  });
}

}  // namespace roundpipe::runtime
