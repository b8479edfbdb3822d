#include <roundpipe/runs/run_folders.h>

#include <sys/stat.h>

#include <filesystem>
#include <map>
#include <utility>
#include <vector>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/device/event.h>
#include <roundpipe/files/run_folder.h>
#include <roundpipe/files/steps.h>

namespace roundpipe {

namespace {

using Place = std::pair<dev_t, ino_t>;

std::optional<Place> place_of(const std::string& path) {
  struct stat found{};
  if (::stat(path.c_str(), &found) != 0) return std::nullopt;
  return Place{found.st_dev, found.st_ino};
}

// Both by real path. Never destroyed: saves may run while the process ends.
struct Folders {
  struct Open {
    Place place;
    std::shared_ptr<files::RunFolder> run;
  };
  Mutex mutex;
  std::map<std::string, Open> open ROUNDPIPE_GUARDED_BY(mutex);
  std::map<std::string, device::EventPtr> saves ROUNDPIPE_GUARDED_BY(mutex);
};
Folders& folders() {
  static auto* instance = new Folders;
  return *instance;
}

}  // namespace

std::string real_path(const std::string& folder) {
  const std::filesystem::path path = std::filesystem::weakly_canonical(std::filesystem::absolute(folder));
  return (path.has_filename() ? path : path.parent_path()).string();  // "run/"
}

void wait_for_all_saves() {
  if (is_left_behind()) return;
  std::vector<device::EventPtr> saves;
  {
    const MutexLock lock(folders().mutex);
    for (const auto& [path, over] : folders().saves) saves.push_back(over);
  }
  for (const device::EventPtr& over : saves) device::wait_interruptible(*over);
}

std::shared_ptr<files::RunFolder> run_folder(const std::string& folder) { return run_folder(folder, tell_user); }

std::shared_ptr<files::RunFolder> run_folder(const std::string& folder, const Tell& tell) {
  const std::string path = real_path(folder);
  std::shared_ptr<files::RunFolder> run;
  {
    Folders& all = folders();
    const MutexLock lock(all.mutex);
    const std::optional<Place> place = place_of(path);
    const auto found = all.open.find(path);
    if (found != all.open.end()) {
      if (place == found->second.place) return found->second.run;
      all.open.erase(found);  // the folder was removed, or another one is in its place
    }
    run = std::make_shared<files::RunFolder>(path);
    all.open[path] = {place_of(path).value_or(Place{}), run};
  }
  for (const std::string& notice : run->notices()) tell("[save_checkpoint] " + notice);
  return run;
}

std::unique_ptr<files::Journal> open_journal(const std::string& folder, int64_t after_step) {
  return run_folder(folder)->open_journal(after_step);
}

std::optional<std::string> latest(const std::string& folder) {
  if (const std::optional<int64_t> step = files::latest_step(folder))
    return (std::filesystem::path(folder) / files::step_name(*step)).string();
  const std::vector<files::FoundStep> incomplete = files::find_steps(folder);
  if (incomplete.empty()) return std::nullopt;
  if (incomplete.back().problem.empty()) return incomplete.back().folder;  // it has just appeared
  throw Error(concat("[latest] ", folder,
                     " has no checkpoint that is whole, expected one among those that are there; restore one, or move "
                     "them away to begin anew; the newest one: ",
                     incomplete.back().problem));
}

void note_save(const std::string& path, device::EventPtr over) {
  const MutexLock lock(folders().mutex);
  folders().saves[path] = std::move(over);
}

void wait_for_saves(const std::string& folder) {
  const std::string path = real_path(folder);
  std::vector<device::EventPtr> saves;
  {
    const MutexLock lock(folders().mutex);
    for (const std::string& own : {path, std::filesystem::path(path).parent_path().string()}) {
      const auto found = folders().saves.find(own);
      if (found != folders().saves.end()) saves.push_back(found->second);
    }
  }
  for (const device::EventPtr& over : saves) device::wait_interruptible(*over);
}

}  // namespace roundpipe
