#include <roundpipe/runtime/model/random.h>
#include <roundpipe/torch_compat/own_generators.h>
#include <torch/csrc/Generator.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using torch_compat::OwnGenerators;

namespace {

// A `with` block, used by one thread.
class OwnGeneratorsBlock {
 public:
  explicit OwnGeneratorsBlock(uint64_t seed) : seed_(seed) {}

  void enter() {
    auto generators = std::make_shared<OwnGenerators>();
    generators->seed(seed_);
    scope_.emplace(std::move(generators));
  }
  void exit(const py::args& /*error*/) { scope_.reset(); }

 private:
  const uint64_t seed_;
  std::optional<OwnGenerators::Scope> scope_;
};

}  // namespace

void bind_random(py::module_& module) {
  py::class_<OwnGeneratorsBlock>(module, "OwnGenerators")
      .def(py::init<uint64_t>(), py::arg("seed"))
      .def("__enter__", &OwnGeneratorsBlock::enter)
      .def("__exit__", &OwnGeneratorsBlock::exit);

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
