#include <roundpipe/files/steps.h>

#include <algorithm>
#include <charconv>
#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe::files {
namespace {

constexpr std::string_view kPrefix = "step-";

}  // namespace

std::vector<FoundStep> named_steps(const std::string& run_folder, FileSystem& files) {
  std::vector<FoundStep> found;
  if (files.look(run_folder).kind == EntryKind::kNothing) return found;
  for (const std::string& name : files.list(run_folder)) {
    if (const auto step = step_of(name)) found.push_back({*step, join(run_folder, name), {}});
  }
  std::sort(found.begin(), found.end(), [](const FoundStep& a, const FoundStep& b) { return a.step < b.step; });
  return found;
}

void check(FoundStep& found, FileSystem& files) {
  try {
    const int64_t step = require_complete(found.folder, files).step;
    if (step == found.step || found.step == kAnyStep) return;
    found.problem = concat("[", found.folder, "] the manifest is of step ", step, ", expected step ", found.step,
                           "; the folder was renamed: give it its old name");
  } catch (const ProcessLimit&) {
    throw;
  } catch (const Error& error) {
    found.problem = error.what();
  }
}

std::string step_name(int64_t step) {
  if (step < 0) throw std::invalid_argument(concat("[checkpoint] the step is ", step, ", expected 0 or more"));
  return concat(kPrefix, step);
}

std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) return {};
  const std::string_view digits = name.substr(kPrefix.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (error != std::errc{} || end != digits.data() + digits.size() || step_name(std::max<int64_t>(step, 0)) != name) {
    return {};
  }
  return step;
}

Manifest require_complete(const std::string& folder, FileSystem& files) {
  if (files.look(folder).kind != EntryKind::kFolder) {
    throw Error(concat("[", folder, "] is no folder, expected a checkpoint; links are not followed"));
  }
  if (files.look(join(folder, kManifestName)).kind != EntryKind::kFile) {
    throw Error(
        concat("[", folder, "] has no ", kManifestName, ", which is written last; it is no complete checkpoint"));
  }
  Manifest manifest = read_manifest(folder, files);
  for (const FileRecord& file : manifest.files) {
    const Entry entry = files.look(join(folder, file.name));
    if (entry.kind != EntryKind::kFile) {
      throw Error(concat("[", folder, "] the file '", file.name, "' of ", file.bytes,
                         " bytes is missing or no regular file; use another checkpoint"));
    }
    if (entry.bytes != file.bytes) {
      throw Error(concat("[", folder, "] the file '", file.name, "' has ", entry.bytes, " bytes, expected ", file.bytes,
                         "; it was cut off or changed: use another checkpoint"));
    }
  }
  return manifest;
}

std::vector<FoundStep> find_steps(const std::string& run_folder, FileSystem& files) {
  std::vector<FoundStep> steps = named_steps(run_folder, files);
  for (FoundStep& found : steps) check(found, files);
  return steps;
}

std::vector<int64_t> complete_steps(const std::string& run_folder, FileSystem& files) {
  std::vector<int64_t> steps;
  for (const FoundStep& found : find_steps(run_folder, files)) {
    if (found.problem.empty()) steps.push_back(found.step);
  }
  return steps;
}

std::optional<int64_t> latest_step(const std::string& run_folder, FileSystem& files) {
  std::vector<FoundStep> steps = named_steps(run_folder, files);
  for (; !steps.empty(); steps.pop_back()) {
    check(steps.back(), files);
    if (steps.back().problem.empty()) return steps.back().step;
  }
  return {};
}

}  // namespace roundpipe::files
