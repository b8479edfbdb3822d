#include <optional>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/error.h>
#include <roundpipe/runs/capture.h>
#include <roundpipe/runs/run_folders.h>
#include <roundpipe/runs/save_work.h>

#include "bindings.h"
#include "python_frontend.h"
#include "python_values.h"
#include "state_values.h"

namespace roundpipe::python {

namespace py = pybind11;
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

std::shared_ptr<SaveWork> make_work(const std::string& path, std::shared_ptr<files::RunFolder> run,
                                    const Capture& capture, std::shared_ptr<SnapshotMemory> memory, int64_t step,
                                    bool overwrite, std::optional<int64_t> keep_last, int64_t keep_every, bool is_loud,
                                    py::object agree) {
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
  return std::make_shared<SaveWork>(std::move(settings), capture.contents(), std::move(memory));
}

// A value and whether it is an object's state_dict().
using Given = std::pair<py::object, bool>;

GivenValue given_value(const Given& given, const std::string& path) {
  return {state_value(given.first, path), given.second};
}

std::shared_ptr<Capture> make_capture(ModelNames names, const std::vector<TrainedModel>& models, int64_t step,
                                      int64_t steps, const std::vector<std::pair<std::string, std::string>>& versions,
                                      const py::dict& other_random_states,
                                      const std::optional<std::string>& loss_counts, int64_t rank, int64_t size) {
  CapturedRun run{.step = step, .steps = steps, .versions = versions, .rank = rank, .size = size};
  run.other_random_states = state_value(other_random_states, "random").entries();
  if (loss_counts) run.loss_counts = nlohmann::ordered_json::parse(*loss_counts);
  const py::gil_scoped_release unlocked;
  return std::make_shared<Capture>(std::move(names), models, std::move(run));
}

void take_schedulers(Capture& capture, const std::vector<Given>& schedulers) {
  std::vector<GivenValue> values;
  for (size_t i = 0; i < schedulers.size(); ++i)
    values.push_back(given_value(schedulers[i], concat("lr_schedulers[", i, "]")));
  const py::gil_scoped_release unlocked;
  capture.take_schedulers(values);
}

void take_values(Capture& capture, const std::vector<std::pair<std::string, Given>>& given) {
  std::vector<std::pair<std::string, GivenValue>> values;
  for (const auto& [name, value] : given) values.emplace_back(name, given_value(value, "state." + name));
  const py::gil_scoped_release unlocked;
  capture.take_values(values);
}

void take_scaler(Capture& capture, py::function later) {
  capture.take_scaler([later = share(std::move(later))] {
    return calling_python([&] { return state_value(object_of(later)(), "scaler"); });
  });
}

void take_plain(Capture& capture, const std::vector<TrainedModel>& models, CopySteps* copies,
                const TrainedOptimizer* optimizer, const py::object& state_dict) {
  const StateValue state = state_value(state_dict, "optimizer");
  const py::gil_scoped_release unlocked;
  capture.take(models, copies, optimizer, state);
}

void bind_capture(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Capture, std::shared_ptr<Capture>>(module, "Capture")
      .def(py::init(&make_capture), py::arg("names"), py::arg("models"), py::arg("step"), py::arg("steps"),
           py::arg("versions"), py::arg("other_random_states"), py::arg("loss_counts"), py::arg("rank"),
           py::arg("size"))
      .def("take_schedulers", &take_schedulers, py::arg("schedulers"))
      .def("take_values", &take_values, py::arg("values"))
      .def("take_scaler", &take_scaler, py::arg("later"))
      .def("take_fused",
           py::overload_cast<const FusedOptimizer&, const TrainedOptimizer&, std::shared_ptr<SnapshotMemory>>(
               &Capture::take),
           py::arg("fused"), py::arg("optimizer"), py::arg("memory"), unlocked)
      .def("take_plain", &take_plain, py::arg("models"), py::arg("copies"), py::arg("optimizer"), py::arg("state_dict"))
      .def(
          "add_file",
          [](const Capture& capture, const std::string& name, const std::string& text) {
            capture.contents()->files[name] = text;
          },
          py::arg("name"), py::arg("text"))
      .def("cancel", &Capture::cancel, unlocked)
      .def(
          "plain_bytes", [](const Capture& capture) { return capture.contents()->plain_bytes(); }, unlocked)
      .def(
          "copy_plain", [](const Capture& capture) { capture.contents()->copy_plain(); }, unlocked)
      .def(
          "buffer_fingerprints", [](const Capture& capture) { return capture.contents()->buffer_fingerprints(); },
          unlocked)
      .def(
          "leave_out_buffers",
          [](const Capture& capture, const std::map<std::string, uint64_t>& of_first_rank) {
            capture.contents()->leave_out_buffers(of_first_rank);
          },
          py::arg("of_first_rank"), unlocked);
}

}  // namespace

void bind_saving(py::module_& module) {
  py::class_<SnapshotMemory, std::shared_ptr<SnapshotMemory>>(module, "SnapshotMemory")
      .def(py::init<int64_t>(), py::arg("limit_bytes"))
      .def("try_take", &SnapshotMemory::try_take, py::arg("bytes"));
  bind_capture(module);
  py::class_<SaveWork, std::shared_ptr<SaveWork>>(module, "SaveWork")
      .def(py::init(&make_work), py::arg("path"), py::arg("run"), py::arg("capture"), py::arg("memory"),
           py::arg("step"), py::arg("overwrite"), py::arg("keep_last"), py::arg("keep_every"), py::arg("is_loud"),
           py::arg("agree"))
      .def(
          "start",
          [](SaveWork& work, std::shared_ptr<Capture> capture, double caller_seconds) {
            work.note_caller_seconds(caller_seconds);
            note_save(work.path(), work.over());
            work.start([capture = std::move(capture)] { capture->finish(); }, now_ms() - 1000 * caller_seconds);
          },
          py::arg("capture"), py::arg("caller_seconds"))
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
