#include <roundpipe/runtime/call/call.h>

#include <algorithm>

#include <ATen/autocast_mode.h>
#include <ATen/ops/allclose.h>

#include <roundpipe/core/frontend.h>
#include <roundpipe/runtime/call/fail_with.h>

namespace roundpipe::runtime {

using device::EventPtr;

AutocastState AutocastState::capture(c10::DeviceType accelerator) {
  AutocastState state;
  for (const c10::DeviceType type : {c10::DeviceType::CPU, accelerator}) {
    if (!state.entries.empty() && type == c10::DeviceType::CPU) break;
    state.entries.push_back({type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  }
  return state;
}

void AutocastState::apply() const {
  for (const Entry& entry : entries) {
    at::autocast::set_autocast_enabled(entry.device_type, entry.enabled);
    at::autocast::set_autocast_dtype(entry.device_type, entry.dtype);
  }
  // The cache keys casts by parameter, but our parameters change their data from job to job.
  at::autocast::set_autocast_cache_enabled(false);
}

Call::Call(std::shared_ptr<ModelState> call_model, RunOptions call_options, CallTerms call_terms, uint64_t call_id,
           uint64_t call_index, uint64_t seed)
    : model(std::move(call_model)),
      options(std::move(call_options)),
      terms(std::move(call_terms)),
      microbatches(options.microbatches.value_or(1)),
      requires_grad(options.requires_grad.value_or(true)),
      id(call_id),
      index(call_index),
      base_seed(seed),
      values_(static_cast<size_t>(model->layer_count() + 1) * static_cast<size_t>(microbatches)),
      gradients_(values_.size()),
      finished_(device::fired_event()) {
  const std::shared_ptr<const void> held = model->hold();
  for (const auto& layer : model->layers) attributes.push_back(layer->layer->attributes());
}

Call::~Call() { frontend().call_over(id); }

bool Call::trains(size_t block) const {
  return std::ranges::any_of(model->blocks[block].layers, [&](int l) {
    const auto& places = model->layers[static_cast<size_t>(l)]->parameters;
    for (size_t i = 0; i < places.size(); ++i) {
      if (places[i].block == block && trainable[static_cast<size_t>(l)][i] != 0) return true;
    }
    return false;
  });
}

EventPtr Call::new_event() {
  EventPtr event = device::make_event();
  const MutexLock lock(mutex_);
  if (error_) {
    event->fail(error_);
  } else {
    events_.add(event);
  }
  return event;
}

void Call::fail(std::exception_ptr error) {
  std::vector<EventPtr> events;
  {
    const MutexLock lock(mutex_);
    if (error_) return;
    error_ = error;
    failed_.store(true);
    events = events_.take();
  }
  for (const EventPtr& event : events) event->fail(error);
}

void Call::then(const std::vector<EventPtr>& events, device::Event::Callback callback) {
  then_or_fail(shared_from_this(), events, std::move(callback));
}

bool Call::attempt(const std::function<void()>& work) noexcept { return succeeds_or_fail(*this, work); }

std::exception_ptr Call::error() const {
  const MutexLock lock(mutex_);
  return error_;
}

void Call::add_jobs(int count) {
  const MutexLock lock(mutex_);
  // A new event even if the old one has not fired yet: job_over() may be about to fire it.
  if (jobs_left_ == 0) finished_ = device::make_event();
  jobs_left_ += count;
}

void Call::job_over() {
  EventPtr finished;
  std::shared_ptr<const StepNote> step;  // dropped after the lock is released: it belongs to the interpreter
  {
    const MutexLock lock(mutex_);
    if (--jobs_left_ == 0) {
      finished = finished_;
      if (step_until_over_ && !full_) step.swap(step_);
    }
  }
  step.reset();
  if (finished) finished->fire();
}

std::shared_ptr<void> Call::hold() {
  add_jobs(1);
  return {nullptr, [call = shared_from_this()](void*) { call->job_over(); }};
}

EventPtr Call::finished() const {
  const MutexLock lock(mutex_);
  return finished_;
}

void Call::let_losses_go_on(bool is_open, int microbatch) {
  for (size_t place = 0; place + 1 < loss_order.size(); ++place) {
    if (!is_open || loss_order[place] == microbatch) loss_turns[static_cast<size_t>(loss_order[place + 1])]->fire();
  }
}

bool Call::lacks_gradient(int microbatch) {
  const MutexLock lock(mutex_);
  without_gradient_.insert(microbatch);
  return std::ssize(without_gradient_) == microbatches;
}

void Call::keep_step(std::shared_ptr<const StepNote> step, bool until_over) {
  const MutexLock lock(mutex_);
  step_.swap(step);
  step_until_over_ = until_over;
}

void Call::ran_out(FullDevice full) {
  const MutexLock lock(mutex_);
  if (!error_ && !full_) full_ = std::move(full);
}

std::optional<Call::Lack> Call::take_lack() {
  const MutexLock lock(mutex_);
  if (!full_) return std::nullopt;
  Lack lack{std::move(*full_), step_};
  full_.reset();
  step_.reset();
  return lack;
}

void Call::save_snapshot(int layer, int microbatch, BufferSnapshot snapshot) {
  const MutexLock lock(mutex_);
  BufferSnapshot& present = snapshots_[{layer, microbatch}];
  // Another attempt at the job has saved the same values, which others may be reading.
  if (present.produced && present.produced->complete() && !present.produced->error()) return;
  present = std::move(snapshot);
}

std::optional<Call::BufferSnapshot> Call::snapshot(int layer, int microbatch) const {
  const MutexLock lock(mutex_);
  const auto found = snapshots_.find({layer, microbatch});
  return found == snapshots_.end() ? std::nullopt : std::optional(found->second);
}

bool are_same_losses(const std::vector<at::Tensor>& again, const std::vector<at::Tensor>& first) {
  return std::ranges::equal(again, first, [](const at::Tensor& a, const at::Tensor& b) {
    return a.sizes() == b.sizes() && at::allclose(a, b, /*rtol=*/1e-3, /*atol=*/1e-5, /*equal_nan=*/true);
  });
}

}  // namespace roundpipe::runtime
