#include <pybind11/numpy.h>

#include <roundpipe/core/error.h>
#include <roundpipe/tokens/packing.h>
#include <roundpipe/tokens/shuffle.h>
#include <roundpipe/tokens/token_file.h>
#include <roundpipe/tokens/token_writer.h>

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

void require_document(const TokenFile& file, int64_t number) {
  if (number >= 0 && number < file.documents()) return;
  throw std::invalid_argument(
      concat("[tokens] there is no document ", number, " in ", file.path(), ", which has ", file.documents()));
}

Numbers tokens_of(const TokenFile& file, int64_t document) {
  require_document(file, document);
  const int64_t count = file.end(document) - file.begin(document);
  Numbers tokens(count);
  int64_t* const to = tokens.mutable_data();
  const py::gil_scoped_release unlocked;
  file.read(file.begin(document), count, to);
  return tokens;
}

void bind_token_files(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<TokenFile>(module, "TokenFile")
      .def(py::init([](const std::string& path) { return std::make_unique<TokenFile>(path); }), py::arg("path"),
           Released())
      .def_property_readonly("documents", &TokenFile::documents)
      .def_property_readonly("tokens", &TokenFile::tokens)
      .def_property_readonly("vocabulary", &TokenFile::vocabulary)
      .def_property_readonly("checksum", &TokenFile::checksum)
      .def("document", &tokens_of, py::arg("number"))
      .def(
          "lengths",
          [](const TokenFile& file, const Numbers& numbers) {
            return changed(numbers, [&](int64_t number) {
              require_document(file, number);
              return file.end(number) - file.begin(number);
            });
          },
          py::arg("numbers"))
      .def("largest", &TokenFile::largest, Released())
      .def("verify", [](const TokenFile& file) { file.verify(); }, Released());
  py::class_<TokenWriter>(module, "TokenWriter")
      .def(py::init([](const std::string& path, int64_t vocabulary) {
             return std::make_unique<TokenWriter>(path, vocabulary);
           }),
           py::arg("path"), py::arg("vocabulary"), Released())
      .def_property_readonly("documents", &TokenWriter::documents)
      .def_property_readonly("tokens", &TokenWriter::tokens)
      .def("append", &TokenWriter::append, py::arg("document"), Released())
      .def("finish", &TokenWriter::finish, Released())
      .def("discard", &TokenWriter::discard, Released());
}

}  // namespace

void bind_tokens(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  module.def("assign_rows", &assign_rows, py::arg("lengths"), py::arg("capacity"), Released());
  bind_token_files(module);
  py::class_<Shuffle>(module, "Shuffle")
      .def(py::init<int64_t, std::string_view>(), py::arg("count"), py::arg("key"))
      .def("__len__", &Shuffle::count)
      .def(
          "at",
          [](const Shuffle& shuffle, const Numbers& positions) {
            return changed(positions, [&](int64_t position) {
              if (position >= 0 && position < shuffle.count()) return shuffle.at(position);
              throw std::invalid_argument(
                  concat("[order] position is ", position, ", expected 0 to ", shuffle.count() - 1));
            });
          },
          py::arg("positions"));
  module.def("epoch_order", &epoch_order, py::arg("count"), py::arg("seed"), py::arg("epoch"));
  module.def("held_out_order", &held_out_order, py::arg("count"), py::arg("seed"));
}

}  // namespace roundpipe::python
