#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <roundpipe/core/frontend.h>
#include <roundpipe/files/file_system.h>
#include <roundpipe/runs/run_folders.h>

namespace roundpipe {

// A file with a JSON object a line, each about a step, that a run which goes on continues. A line is in the file when
// add() returns. While lines cannot be written, for example on a full disk, the run goes on: they wait, which is told
// once, and are written with the next one. Thread safety: one thread.
class StepLines {
 public:
  // Opens the file. Of lines that are there, those of steps up to `after_step` stay, since later ones are made again;
  // none of a new run's, whose `after_step` is 0. Throws Error if the file cannot be written.
  StepLines(const std::string& path, int64_t after_step, Tell tell = tell_user,
            files::FileSystem& files = files::FileSystem::real());

  // REQUIRES: `line` is a JSON object with a "step", in one line.
  void add(const std::string& line);
  // All of the file, those that wait included.
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  const Tell tell_;
  std::vector<std::string> lines_;
  files::File file_;
  int64_t written_bytes_ = 0;
  std::string unwritten_;
  bool has_told_ = false;
};

}  // namespace roundpipe
