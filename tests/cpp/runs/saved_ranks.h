#pragma once

#include <atomic>
#include <barrier>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <roundpipe/core/error.h>
#include <roundpipe/runs/run_folders.h>
#include <roundpipe/runs/save_work.h>

#include "../temporary_folder.h"

// Saves of contents that a test has made, by one process or by ranks that are threads of it.
namespace roundpipe {

inline SaveWork::Settings settings_of(const std::string& folder) {
  return {.step = 4, .path = folder, .run = run_folder(folder), .tell = [](const std::string&) {}};
}

inline std::shared_ptr<SaveWork> save(
    SaveWork::Settings settings, const std::shared_ptr<Contents>& contents, std::function<void()> finish = [] {}) {
  auto work = std::make_shared<SaveWork>(std::move(settings), contents, std::make_shared<saving::SnapshotMemory>(0));
  work->start(std::move(finish), 0);
  return work;
}

// Ranks in threads of one process: agreement as Ranks of Python have it.
class Together {
 public:
  explicit Together(int64_t size) : told_(static_cast<size_t>(size)), barrier_(size) {}

  SaveWork::Agree agree(int64_t rank) {
    return [this, rank](const SaveWork::Part& part) {
      try {
        told_[static_cast<size_t>(rank)] = part();
      } catch (...) {
        failed_ = true;
      }
      barrier_.arrive_and_wait();
      std::vector<std::string> all = told_;
      barrier_.arrive_and_wait();
      if (failed_) throw Error("a rank has failed");
      return all;
    };
  }

 private:
  std::vector<std::string> told_;
  std::atomic<bool> failed_ = false;
  std::barrier<> barrier_;
};

inline std::vector<std::shared_ptr<SaveWork>> save_together(const std::string& folder, Together& together,
                                                            const std::vector<std::shared_ptr<Contents>>& contents) {
  std::vector<std::shared_ptr<SaveWork>> works;
  for (const std::shared_ptr<Contents>& own : contents) {
    SaveWork::Settings settings = settings_of(folder);
    if (own->rank() > 0) settings.run = nullptr;
    settings.agree = together.agree(own->rank());
    works.push_back(save(std::move(settings), own));
  }
  return works;
}

}  // namespace roundpipe
