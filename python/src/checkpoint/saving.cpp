#include <optional>

#include <roundpipe/core/clock.h>
#include <roundpipe/runs/run_folders.h>
#include <roundpipe/runs/save_work.h>
#include <roundpipe/saving/snapshot.h>

#include "bindings.h"
#include "python_frontend.h"
#include "python_values.h"
#include "state_values.h"

namespace roundpipe::python {

namespace py = pybind11;
using runtime::ModelOptimizer;
using saving::Snapshot;
using saving::SnapshotMemory;

namespace {

// Calls a Python function of a save's thread, and throws what it raises. The frames of the error are cleared, since
// they hold what is saved.
template <typename Call>
auto calling_python(Call call) {
  const InterpreterLock lock;
  try {
    return call();
  } catch (py::error_already_set& raised) {
    if (raised.trace()) py::module_::import("traceback").attr("clear_frames")(raised.trace());
    throw_python_error(raised);
  }
}

void tell(const std::string& line) {
  calling_python([&] {
    const py::object to = py::module_::import("sys").attr("stderr");
    py::module_::import("builtins").attr("print")(line, py::arg("file") = to);
  });
}

// `agree`: Ranks.agree of the ranks that save together.
SaveWork::Agree agree_by(py::object agree) {
  return [agree = share(std::move(agree))](const SaveWork::Part& part) {
    return calling_python([&] {
      const py::cpp_function in_turn([&part] {
        const py::gil_scoped_release unlocked;
        return part();
      });
      return object_of(agree)(in_turn).cast<std::vector<std::string>>();
    });
  };
}

std::shared_ptr<SaveWork> make_work(const std::string& path, std::shared_ptr<checkpoint::RunFolder> run,
                                    std::shared_ptr<Contents> contents, std::shared_ptr<SnapshotMemory> memory,
                                    int64_t step, bool overwrite, std::optional<int64_t> keep_last, int64_t keep_every,
                                    bool is_loud, py::object agree) {
  SaveWork::Settings settings{.step = step,
                              .path = path,
                              .run = std::move(run),
                              .overwrite = overwrite,
                              .keep_last = keep_last,
                              .keep_every = keep_every,
                              .tell = tell};
  if (!agree.is_none()) settings.agree = agree_by(std::move(agree));
  if (is_loud) {
    settings.text_of = [](const std::exception_ptr& error) {
      return calling_python([&] { return std::string(py::str(exception_object(error))); });
    };
  }
  return std::make_shared<SaveWork>(std::move(settings), std::move(contents), std::move(memory));
}

using Place = std::tuple<size_t, size_t, std::string, std::string, std::vector<std::string>>;

void set_snapshot(Contents& contents, std::shared_ptr<Snapshot> snapshot, const std::vector<Place>& places) {
  Contents::Places by_place;
  for (const auto& [block, parameter, name, in_file, moments] : places)
    by_place[{block, parameter}] = {name, in_file, moments};
  contents.set_snapshot(std::move(snapshot), std::move(by_place));
}

void set_states(Contents& contents, const py::dict& common, const py::dict& own) {
  const nlohmann::ordered_json of_all = json_of(common), of_rank = json_of(own);
  const py::gil_scoped_release unlocked;
  contents.set_states(of_all, of_rank);
}

void bind_contents(py::module_& module) {
  py::class_<Contents, std::shared_ptr<Contents>>(module, "Contents")
      .def(py::init<int64_t, int64_t, bool>(), py::arg("rank"), py::arg("size"), py::arg("is_adapter"))
      .def(
          "add",
          [](Contents& contents, const std::string& section, const std::string& name, const at::Tensor& tensor,
             const std::optional<at::Tensor>& values) {
            contents.add(section, {name, tensor, std::nullopt, values.value_or(at::Tensor())});
          },
          py::arg("section"), py::arg("name"), py::arg("tensor"), py::arg("values") = py::none())
      .def(
          "add_file",
          [](Contents& contents, const std::string& name, const std::string& text) { contents.files[name] = text; },
          py::arg("name"), py::arg("text"))
      .def_property_readonly("encoder", &Contents::encoder, py::return_value_policy::reference_internal)
      .def_property_readonly("own_encoder", &Contents::own_encoder, py::return_value_policy::reference_internal)
      .def("set_states", &set_states, py::arg("common"), py::arg("own"))
      .def("set_snapshot", &set_snapshot, py::arg("snapshot"), py::arg("places"))
      .def("take_snapshot",
           [](Contents& contents) {
             Contents::SnapshotState state;
             {
               const py::gil_scoped_release unlocked;
               state = contents.take_snapshot();
             }
             return std::pair(EncodedValue{std::move(state.counters)}, EncodedValue{std::move(state.strides)});
           })
      .def("plain_bytes", &Contents::plain_bytes)
      .def("copy_plain", &Contents::copy_plain, py::call_guard<py::gil_scoped_release>())
      .def("buffer_fingerprints", &Contents::buffer_fingerprints, py::call_guard<py::gil_scoped_release>())
      .def("leave_out_buffers", &Contents::leave_out_buffers, py::arg("of_first_rank"),
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_saving(py::module_& module) {
  py::class_<SnapshotMemory, std::shared_ptr<SnapshotMemory>>(module, "SnapshotMemory")
      .def(py::init<int64_t>(), py::arg("limit_bytes"))
      .def("try_take", &SnapshotMemory::try_take, py::arg("bytes"));
  py::class_<Snapshot, std::shared_ptr<Snapshot>>(module, "Snapshot")
      .def_static(
          "of",
          [](const std::shared_ptr<ModelOptimizer>& optimizer, std::shared_ptr<SnapshotMemory> memory,
             bool with_weights) { return Snapshot::of(*optimizer, std::move(memory), optimizer, with_weights); },
          py::arg("optimizer"), py::arg("memory"), py::arg("with_weights"))
      .def("cancel", &Snapshot::cancel, py::call_guard<py::gil_scoped_release>());
  bind_contents(module);
  py::class_<SaveWork, std::shared_ptr<SaveWork>>(module, "SaveWork")
      .def(py::init(&make_work), py::arg("path"), py::arg("run"), py::arg("contents"), py::arg("memory"),
           py::arg("step"), py::arg("overwrite"), py::arg("keep_last"), py::arg("keep_every"), py::arg("is_loud"),
           py::arg("agree"))
      .def(
          "start",
          [](SaveWork& work, py::function finish, double caller_seconds) {
            work.note_caller_seconds(caller_seconds);
            note_save(work.path(), work.over());
            work.start([finish = share(std::move(finish))] { calling_python([&] { object_of(finish)(); }); },
                       now_ms() - 1000 * caller_seconds);
          },
          py::arg("finish"), py::arg("caller_seconds"))
      .def_property_readonly("step", &SaveWork::step)
      .def_property_readonly("folder", &SaveWork::folder)
      .def_property_readonly("done", &SaveWork::done)
      .def("wait",
           [](const SaveWork& work) {
             const py::gil_scoped_release unlocked;
             const SaveReport report = work.wait();
             return std::tuple(report.bytes, report.seconds, report.caller_seconds, report.longest_wait_seconds,
                               report.waited_seconds, report.held_bytes);
           })
      .def("wait_read", &SaveWork::wait_read, py::call_guard<py::gil_scoped_release>())
      .def("wait_over", &SaveWork::wait_over, py::call_guard<py::gil_scoped_release>());
  module.def(
      "run_folder", [](const std::string& folder) { return run_folder(folder, tell); }, py::arg("folder"),
      py::call_guard<py::gil_scoped_release>());
  module.def("check_save", &check_save, py::arg("step"), py::arg("keep_last"), py::arg("keep_every"));
  module.def("default_snapshot_bytes", &default_snapshot_bytes, py::arg("models"), py::arg("host_budget_bytes"));
  module.def("real_path", &real_path, py::arg("folder"), py::call_guard<py::gil_scoped_release>());
  module.def("wait_for_saves", &wait_for_saves, py::arg("folder"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace roundpipe::python
