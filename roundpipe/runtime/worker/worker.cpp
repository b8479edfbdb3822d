#include <roundpipe/runtime/worker/worker.h>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/frontend.h>

namespace roundpipe::runtime {

Worker::Worker(int index, std::unique_ptr<device::Device> device, LinkObservers observers)
    : device_(std::move(device)),
      upload_(device_->upload(), device_->link_options(), std::move(observers.up)),
      download_(device_->download(), device_->link_options(), std::move(observers.down)),
      outbox_(*device_, download_),
      layers_(*device_, upload_, outbox_, index),
      room_(*device_, queue_, upload_, download_, layers_),
      runner_(index, room_, outbox_, layers_),
      thread_([this] { loop(); }) {}

void Worker::stop() {
  if (!thread_.joinable()) return;
  queue_.stop();
  thread_.join();
  upload_.stop();
  download_.stop();
  room_.trim();
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
  if (run.call->failed()) return;
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
    if (!is_left_behind()) run.call->fail(std::current_exception());
  }
  at::autocast::set_autocast_enabled(at::kCPU, false);
  if (!device_->is_virtual()) at::autocast::set_autocast_enabled(device_->torch_device().type(), false);
}

}  // namespace roundpipe::runtime
