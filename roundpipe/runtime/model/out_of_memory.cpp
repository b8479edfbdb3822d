#include <roundpipe/runtime/model/out_of_memory.h>

#include <c10/util/Exception.h>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>

namespace roundpipe::runtime {

void with_raised_errors(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    frontend().raise(error);
    throw;
  }
}

bool is_out_of_memory(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (...) {
    return frontend().is_out_of_memory(error);
  }
}

std::string describe(const FullDevice& full) {
  std::string text = concat("there was no room for ", full.doing, " of ", full.model);
  if (full.microbatch >= 0) text += concat(", microbatch ", full.microbatch, " of ", full.microbatches);
  text += concat(", in call ", full.call, ", on ", full.device);
  if (full.limit_bytes > 0) text += concat(", whose cap is ", format_bytes(full.limit_bytes));
  return concat(text, "; ", full.tried);
}

std::exception_ptr explained(const std::exception_ptr& error, const FullDevice& full,
                             const std::shared_ptr<const StepNote>& step) {
  frontend().release_values(error);
  std::string lines = describe(full);
  if (const std::string told = step ? step->explain(full.limit_bytes) : std::string(); !told.empty())
    lines += "\n" + told;
  if (std::exception_ptr told = frontend().explain(error, lines)) return told;
  try {
    std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError& raised) {
    // A copy: other threads may be reading the call's own error.
    c10::OutOfMemoryError told = raised;
    told.add_context(lines);
    return std::make_exception_ptr(told);
  } catch (...) {
    return error;
  }
}

void warn_user(const std::string& notice) {
  if (!frontend().warn(notice)) TORCH_WARN(notice);
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
  frontend().clear_error();
  return error;
}

}  // namespace roundpipe::runtime
