#include <roundpipe/runtime/out_of_memory.h>

#include <utility>

#include <c10/util/Exception.h>

namespace roundpipe::runtime {
namespace {

ErrorHooks& hooks() {
  static ErrorHooks instance;
  return instance;
}

}  // namespace

void set_error_hooks(ErrorHooks given) { hooks() = std::move(given); }

void clear_error() {
  if (hooks().clear) hooks().clear();
}

bool is_out_of_memory(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (...) {
    return hooks().is_out_of_memory && hooks().is_out_of_memory(error);
  }
}

std::exception_ptr out_of_memory_in(const std::function<void()>& body) {
  std::exception_ptr error;
  try {
    body();
  } catch (...) {
    error = std::current_exception();
  }
  if (!error) return nullptr;
  if (!is_out_of_memory(error)) std::rethrow_exception(error);
  clear_error();
  return error;
}

}  // namespace roundpipe::runtime
