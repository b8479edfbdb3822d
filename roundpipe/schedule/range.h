#pragma once

#include <string>

namespace roundpipe::schedule {

// Consecutive integers [first, last): layers of a stage, microbatches of a job.
struct Range {
  int first = 0;
  int last = 0;

  int size() const { return last - first; }
  bool contains(int value) const { return first <= value && value < last; }
  bool operator==(const Range&) const = default;
};

// "[first, last)", as errors and logs print it.
inline std::string to_string(Range range) {
  std::string text(1, '[');  // g++ 12 sees a false overlap in `"[" + string` at -O3
  text += std::to_string(range.first) + ", " + std::to_string(range.last);
  return text += ')';
}

}  // namespace roundpipe::schedule
