#include <pybind11/numpy.h>

#include <roundpipe/core/error.h>
#include <roundpipe/tokens/packing.h>
#include <roundpipe/tokens/shuffle.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using namespace tokens;

namespace {

using Numbers = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

// An array of the same shape.
template <typename Change>
Numbers changed(const Numbers& numbers, const Change& change) {
  Numbers result(std::vector<py::ssize_t>(numbers.shape(), numbers.shape() + numbers.ndim()));
  const int64_t* const from = numbers.data();
  int64_t* const to = result.mutable_data();
  const py::ssize_t count = numbers.size();
  const py::gil_scoped_release unlocked;
  for (py::ssize_t i = 0; i < count; ++i) to[i] = change(from[i]);
  return result;
}

}  // namespace

void bind_tokens(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  module.def("assign_rows", &assign_rows, py::arg("lengths"), py::arg("capacity"), Released());
  py::class_<Shuffle>(module, "Shuffle")
      .def(py::init<int64_t, std::string_view>(), py::arg("count"), py::arg("key"))
      .def("__len__", &Shuffle::count)
      .def(
          "at",
          [](const Shuffle& shuffle, const Numbers& positions) {
            return changed(positions, [&](int64_t position) {
              if (position >= 0 && position < shuffle.count()) return shuffle.at(position);
              throw std::invalid_argument(concat("[order] position is ", position, ", expected 0 to ",
                                                 shuffle.count() - 1));
            });
          },
          py::arg("positions"));
  module.def("epoch_order", &epoch_order, py::arg("count"), py::arg("seed"), py::arg("epoch"));
  module.def("held_out_order", &held_out_order, py::arg("count"), py::arg("seed"));
}

}  // namespace roundpipe::python
