#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <roundpipe/files/file_system.h>
#include <roundpipe/files/steps.h>

namespace roundpipe::files {

// Which checkpoint is loaded: the newest one or, for as long as what was tried is damaged, the one before it. Whatever
// is passed over is told in a line that names what is wrong with it and says how many steps are lost. Of the
// checkpoints themselves, only manifests are read. Thread safety: one thread.
class FallBack {
 public:
  using Tell = std::function<void(const std::string& line)>;
  // `folder`: one checkpoint, or a run's folder.
  FallBack(std::string folder, Tell tell, FileSystem& files = FileSystem::real());

  // The folder of the checkpoint to load now, which is complete as far as its manifest tells. Throws Error when there
  // is none left: it says what is wrong with the newest one.
  std::string next();
  // The checkpoint that next() has named is damaged, as `problem` says.
  void damaged(const std::string& problem);

 private:
  struct Passed {
    int64_t step = 0;
    std::string problem;
    bool told = false;
  };
  void pass(const std::string& problem);

  const std::string folder_;
  const Tell tell_;
  FileSystem& files_;
  std::vector<FoundStep> left_;  // ascending; the last one is tried next
  std::vector<Passed> passed_;   // newest first
};

}  // namespace roundpipe::files
