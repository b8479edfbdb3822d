#include <roundpipe/runtime/worker/worker.h>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/memory/host_arena.h>

namespace roundpipe::runtime {

using device::EventPtr;

Worker::Worker(int index, int number, std::unique_ptr<device::Device> device, LinkObservers observers)
    : number_(number),
      device_(std::move(device)),
      upload_(device_->upload(), device_->link_options(), std::move(observers.up)),
      download_(device_->download(), device_->link_options(), std::move(observers.down)),
      outbox_(*device_, download_),
      layers_(*device_, upload_, outbox_, watch_, number),
      room_(*device_, queue_, upload_, download_, layers_, watch_),
      runner_(index, room_, outbox_, layers_, watch_),
      thread_([this] { loop(); }) {}

void Worker::stop() {
  if (!thread_.joinable()) return;
  queue_.stop();
  if (!queue_.drained()) return;
  thread_.join();
  upload_.stop();
  download_.stop();
  room_.trim();
  ended_.store(true);
}

namespace {

// torch sets the number of threads for the calling thread and, as the default of later threads, for the process.
void use_threads(int threads) {
  if (threads == 0) return;
  const int process_threads = at::get_num_threads();
  at::set_num_threads(threads);
  std::thread([process_threads] { at::set_num_threads(process_threads); }).join();
}

}  // namespace

void Worker::loop() {
  become_engine_thread();
  const std::shared_ptr<void> attached = frontend().attach_thread();
  use_threads(device_->threads());
  become_device_thread();
  while (const std::shared_ptr<JobRun> run = queue_.wait_for_job()) {
    // Results of the job before leave the device before this one takes memory, so that peaks do not depend on timing.
    if (device_->copies_on_compute_cores()) queue_.wait_released();
    execute(*run);
    if (is_left_behind()) {
      // The user's code has forked, and this thread is all of the child. It ends, and the process with it; objects that
      // belong to the interpreter are leaked.
      static_cast<void>(new std::shared_ptr<void>(attached));
      return;
    }
    room_.release(run);
  }
}

void Worker::execute(JobRun& run) {
  if (run.attempt->error()) return;
  // A thread takes over torch's number of threads at its first parallel loop; a matrix product before that would use
  // all cores, and sum in another order.
  if (device_->threads() == 0) at::init_num_threads();
  try {
    const auto scope = device_->compute().enter();
    const at::ThreadLocalStateGuard state(*run.call->thread_state);
    run.call->autocast.apply();
    const torch_compat::OwnGenerators::Scope generators(generators_);
    runner_.run(run);
  } catch (...) {
    frontend().clear_error();
    if (!is_left_behind()) run.attempt->fail(std::current_exception());
  }
  at::autocast::set_autocast_enabled(at::kCPU, false);
  if (!device_->is_virtual()) at::autocast::set_autocast_enabled(device_->torch_device().type(), false);
}

void Worker::try_copies(std::function<void(bool same)> told) {
  constexpr int64_t kBytes = 1 << 16;
  struct Trip {
    at::Tensor sent, there, back;
    std::function<void(bool same)> told;
  };
  auto trip = std::make_shared<Trip>();
  trip->told = std::move(told);
  const bool pinned = device_->wants_pinned_host_memory();
  memory::HostArena& arena = memory::HostArena::values(pinned);
  trip->sent = arena.allocate(kBytes);
  trip->back = arena.allocate(kBytes);
  auto* bytes = trip->sent.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<uint8_t>((i * 2654435761) >> 13);
  const EventPtr up = device::make_event(), down = device::make_event();
  upload_.submit({transfer::Priority::kActivation,
                  {},
                  [trip, device = device_->torch_device()] {
                    try {
                      trip->there = at::empty({kBytes}, at::TensorOptions().dtype(at::kByte).device(device));
                    } catch (const c10::OutOfMemoryError&) {
                      throw Error("[verify] the device has no memory for bytes that are sent to it and back");
                    }
                    return std::vector<transfer::Piece>{{trip->there, trip->sent}};
                  },
                  up,
                  nullptr});
  // The second transfer fails with the first.
  download_.submit({transfer::Priority::kActivation,
                    {up},
                    [trip] { return std::vector<transfer::Piece>{{trip->back, trip->there}}; },
                    down,
                    nullptr});
  down->then([trip, down] { trip->told(down->error() || trip->sent.equal(trip->back)); },
             [](const std::exception_ptr&) {});
}

void Worker::watch() {
  const double limit_ms = device_->watchdog_ms();
  if (limit_ms <= 0 || device_->health()->failed()) return;
  std::optional<std::string> late = watch_.overdue(now_ms(), limit_ms);
  for (const auto& [link, what] : {std::pair{&upload_, "a copy to it"}, std::pair{&download_, "a copy from it"}}) {
    if (!late && link->is_overdue(now_ms(), limit_ms)) late = concat(what, ", which has not arrived");
  }
  if (!late) return;
  queue_.leave();
  device_->health()->fail(DeviceError(concat("[", device_->name(), "] the device failed: after ", limit_ms / 1e3,
                                             " s, its watchdog's time, it was still busy with ", *late)));
}

}  // namespace roundpipe::runtime
