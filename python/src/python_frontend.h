#pragma once

#include <roundpipe/core/frontend.h>

#include "python_values.h"

namespace roundpipe::python {

// The exception object that a Python program sees for `error`. REQUIRES: the interpreter lock.
pybind11::object exception_object(const std::exception_ptr& error);

// The engine's interface to Python. Every method takes the interpreter lock itself.
class PythonFrontend final : public Frontend {
 public:
  // `saved`: a dict by call; the entry of a call is dropped once nothing of the call will run again. REQUIRES: the
  // interpreter lock.
  void set_saved_by_call(SharedObject saved) { saved_by_call_ = std::move(saved); }

  std::shared_ptr<void> attach_thread() override;
  void check_interrupt() override;
  void call_over(uint64_t call) override;
  bool is_out_of_memory(const std::exception_ptr& error) override;
  void clear_error() override;
  bool is_interrupt(const std::exception_ptr& error) override;
  std::string said(const std::exception& error) override;
  void release_values(const std::exception_ptr& error) override;
  std::shared_ptr<void> without_collection() override;
  std::string quoted(const std::string& text) override;
  std::string option(const std::string& name, const std::string& value) override;
  std::exception_ptr explain(const std::exception_ptr& error, const std::string& lines) override;
  bool warn(const std::string& notice) override;
  void raise(const Error& error) override;

 private:
  SharedObject saved_by_call_;
};

}  // namespace roundpipe::python
