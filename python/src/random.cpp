#include <roundpipe/runtime/model/random.h>
#include <roundpipe/torch_compat/own_generators.h>
#include <torch/csrc/Generator.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using torch_compat::OwnGenerators;

namespace {

// A `with` block, used by one thread.
class DrawsApartBlock {
 public:
  DrawsApartBlock(uint64_t seed, const c10::Device& device) : seed_(seed), device_(device) {}

  void enter() {
    const py::gil_scoped_release released;  // who draws on the card may want it
    draws_.emplace(seed_, device_);
  }
  void exit(const py::args& /*error*/) { draws_.reset(); }

 private:
  const uint64_t seed_;
  const c10::Device device_;
  std::optional<runtime::DrawsApart> draws_;
};

}  // namespace

void bind_random(py::module_& module) {
  py::class_<DrawsApartBlock>(module, "DrawsApart")
      .def(py::init<uint64_t, const c10::Device&>(), py::arg("seed"), py::arg("device"))
      .def("__enter__", &DrawsApartBlock::enter)
      .def("__exit__", &DrawsApartBlock::exit);

  module.def(
      "own_generator",
      [](const c10::Device& device) -> py::object {
        OwnGenerators* const own = OwnGenerators::current();
        const at::Generator mine = own != nullptr ? own->of(device) : at::Generator();
        return mine.defined() ? py::reinterpret_steal<py::object>(THPGenerator_Wrap(mine)) : py::none();
      },
      py::arg("device"));
  module.def(
      "make_stand_in",
      [](const py::object& made, const at::Generator& standard) {
        reinterpret_cast<THPGenerator*>(made.ptr())->cdata = standard;
        made.inc_ref();  // otherwise its destructor would drop the default generator's own Python object
      },
      py::arg("made"), py::arg("standard"));

  module.def("layer_seed", &runtime::layer_seed, py::arg("base_seed"), py::arg("model_name"), py::arg("call"),
             py::arg("microbatch"), py::arg("layer"));
  module.def("backward_seed", &runtime::backward_seed, py::arg("forward_seed"));
}

}  // namespace roundpipe::python
