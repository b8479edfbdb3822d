#pragma once

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/utils/pybind.h>

namespace roundpipe::python {

void bind_errors(pybind11::module_& module);
void bind_frontend(pybind11::module_& module);
void bind_checkpoint_files(pybind11::module_& module);
void bind_copy_steps(pybind11::module_& module);
void bind_device(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_microbatches(pybind11::module_& module);
void bind_modules(pybind11::module_& module);
void bind_models(pybind11::module_& module);
void bind_model_core(pybind11::module_& module);
void bind_model_optimizer(pybind11::module_& module);
void bind_nodes(pybind11::module_& module);
void bind_ops(pybind11::module_& module);
void bind_optim(pybind11::module_& module);
void bind_pipeline(pybind11::module_& module);
void bind_quantise(pybind11::module_& module);
void bind_random(pybind11::module_& module);
void bind_run_folder(pybind11::module_& module);
void bind_saving(pybind11::module_& module);
void bind_schedule(pybind11::module_& module);
void bind_stored_checkpoint(pybind11::module_& module);
void bind_step_records(pybind11::module_& module);
void bind_tokens(pybind11::module_& module);
void bind_training_load(pybind11::module_& module);
void bind_training_options(pybind11::module_& module);

// The Python class of a small struct: read-only attributes, and a __repr__ that shows them in their order, such as
// "MovedBytes(uploaded_bytes=3, downloaded_bytes=0)".
template <typename T>
class ValueClass : public pybind11::class_<T> {
 public:
  ValueClass(pybind11::module_& module, const char* name) : pybind11::class_<T>(module, name) {
    this->def("__repr__", [name, names = names_](const pybind11::object& self) {
      std::string text = name;
      const char* separator = "(";
      for (const char* attribute : *names) {
        text += separator + std::string(attribute) + "=" + std::string(pybind11::repr(self.attr(attribute)));
        separator = ", ";
      }
      return text + ")";
    });
  }

  // `value`: a data member, or a callable that takes the struct. Both names must outlive the class.
  template <typename Value>
  ValueClass& attribute(const char* name, Value value) {
    names_->push_back(name);
    if constexpr (std::is_member_object_pointer_v<Value>) {
      this->def_readonly(name, value);
    } else {
      this->def_property_readonly(name, std::move(value));
    }
    return *this;
  }

 private:
  // Shared with __repr__, which is defined before the attributes are known.
  const std::shared_ptr<std::vector<const char*>> names_ = std::make_shared<std::vector<const char*>>();
};

}  // namespace roundpipe::python
