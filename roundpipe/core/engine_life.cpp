#include <roundpipe/core/engine_life.h>

#include <pthread.h>

#include <atomic>

#include <roundpipe/core/error.h>

namespace roundpipe {
namespace {

std::atomic<bool> begun{false};
std::atomic<bool> ended{false};
std::atomic<bool> left_behind{false};

thread_local bool runs_layers = false;
thread_local bool of_engine = false;

// Registered when the library is loaded, so that no fork can come before.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { left_behind.store(begun.load()); });

}  // namespace

void engine_begins() noexcept { begun.store(true); }

void engine_ends() noexcept { ended.store(true); }

bool is_left_behind() noexcept { return left_behind.load(std::memory_order_relaxed); }

bool engine_has_ended() noexcept { return ended.load(); }

void require_own_process() {
  if (!is_left_behind()) return;
  throw Error(
      "[engine] this process was made by fork after its parent had used a RoundPipe model, and the engine's threads "
      "exist only in the parent; start the process with 'spawn', or fork before the first model is made");
}

void require_engine() {
  require_own_process();
  if (!engine_has_ended()) return;
  throw Error(
      "[engine] the process is exiting and the engine has ended, expected a call before that; make it in the program "
      "itself, or in an exit handler that is registered after the engine's first use");
}

void become_engine_thread() noexcept { of_engine = true; }

bool is_engine_thread() noexcept { return of_engine; }

void become_device_thread() noexcept { runs_layers = true; }

void require_callers_thread() {
  if (!runs_layers) return;
  throw Error(
      "[engine] a layer or a loss function has called a model in the pipeline or changed the devices, and would wait "
      "for the device that it occupies itself; expected that from outside the pipeline; call the plain module there, "
      "or do it before or after this call");
}

}  // namespace roundpipe
