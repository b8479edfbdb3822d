#pragma once

#include <cstdint>
#include <vector>

namespace roundpipe::tokens {

// Assigns samples to rows by best fit decreasing: the longest first, each into the fullest row with room for it.
// Returns the numbers of each row's samples, ascending; rows are in the order of their first sample. Any thread. Throws
// std::invalid_argument for a length that is not from 0 to `capacity`.
std::vector<std::vector<int64_t>> assign_rows(const std::vector<int64_t>& lengths, int64_t capacity);

}  // namespace roundpipe::tokens
