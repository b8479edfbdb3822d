#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace roundpipe::cluster {

// What a rank has, by the name of the thing, in the order in which messages name them. Of a name that is there twice,
// the last value counts.
using Told = std::vector<std::pair<std::string, std::string>>;

// `rank 2`, `ranks 0 and 1`, `ranks 0, 1 and 3`. REQUIRES: there is one.
std::string ranks_in_words(const std::vector<int>& ranks);

// Who has which value, given each rank's: `ranks 0 and 2 have X, rank 1 has Y`.
std::string held(const std::vector<std::string>& values);

// What differs in what the ranks have told, in words; empty if nothing does. What a rank does not name, it has not got.
std::string differences(const std::vector<Told>& told);

// Short, and the same for the same names and values in any order, on every machine.
uint64_t digest_of(const Told& told);

}  // namespace roundpipe::cluster
