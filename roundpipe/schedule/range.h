#pragma once

#include <string>

namespace roundpipe::schedule {

// Consecutive integers [first, last): the layers of a stage or the microbatches of a job.
struct Range {
  int first = 0;
  int last = 0;

  int size() const { return last - first; }
  bool contains(int value) const { return first <= value && value < last; }
  bool operator==(const Range&) const = default;
};

// "[first, last)", the form in errors and logs.
inline std::string to_string(Range range) {
  std::string text(1, '[');  // at -O3, g++ 12 warns of a false overlap in `"[" + string`
  text += std::to_string(range.first) + ", " + std::to_string(range.last);
  return text += ')';
}

}  // namespace roundpipe::schedule
