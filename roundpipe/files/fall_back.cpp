#include <roundpipe/files/fall_back.h>

#include <string_view>
#include <utility>

#include <roundpipe/core/error.h>
#include <roundpipe/files/damage.h>

namespace roundpipe::files {
namespace {

std::string_view name_of(std::string_view folder) {
  while (folder.ends_with('/')) folder.remove_suffix(1);
  return folder.substr(folder.rfind('/') + 1);
}

// A folder that is a checkpoint, whole or not, and no run.
bool is_one(const std::string& folder, FileSystem& files) {
  if (files.look(join(folder, kManifestName)).kind != EntryKind::kNothing) return true;
  return step_of(name_of(folder)) && files.look(folder).kind != EntryKind::kNothing &&
         named_steps(folder, files).empty();
}

}  // namespace

FallBack::FallBack(std::string folder, Tell tell, FileSystem& files)
    : folder_(std::move(folder)), tell_(std::move(tell)), files_(files) {
  if (is_one(folder_, files_)) {
    left_.push_back({.step = kAnyStep, .folder = folder_, .problem = {}});
  } else {
    left_ = named_steps(folder_, files_);
  }
}

std::string FallBack::next() {
  for (; !left_.empty(); pass(left_.back().problem)) {
    FoundStep& candidate = left_.back();
    check(candidate, files_);
    if (!candidate.problem.empty()) continue;
    for (Passed& passed : passed_) {
      if (std::exchange(passed.told, true)) continue;
      const int64_t lost = passed_.front().step - candidate.step;
      tell_(concat("[load_checkpoint] going back from step ", passed.step, " to step ", candidate.step,
                   ", which loses ", lost, lost == 1 ? " step: " : " steps: ", passed.problem));
    }
    return candidate.folder;
  }
  if (passed_.empty() && files_.look(folder_).kind == EntryKind::kNothing) {
    throw Error(concat("[load_checkpoint] ", folder_, " is not there, expected a checkpoint or the folder of a run"));
  }
  std::string why;
  if (!passed_.empty()) why = concat("; the newest one: ", passed_.front().problem);
  throw Error(concat("[load_checkpoint] ", folder_,
                     " has no checkpoint that is whole, expected step-N with all its files", why));
}

void FallBack::damaged(const std::string& problem) { pass(problem); }

void FallBack::pass(const std::string& problem) {
  note_damaged(left_.back().folder);
  passed_.push_back({left_.back().step, problem, false});
  left_.pop_back();
}

}  // namespace roundpipe::files
