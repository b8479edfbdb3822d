#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace roundpipe::train {

// metrics.jsonl in the folder of a run: a JSON object a line, each with the step that it is about. A line is in the
// file when add() returns. Thread safety: one thread.
class Metrics {
 public:
  // Opens the file, and removes lines about steps after `step`, which a run that resumes makes again. Throws Error.
  Metrics(const std::string& folder, int64_t step);

  // NaN and infinities are written as null.
  void add(int64_t step, const std::vector<std::pair<std::string, double>>& values);

 private:
  const std::string path_;
};

}  // namespace roundpipe::train
