#pragma once

#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <roundpipe/saving/tensor_files.h>

// What the states of a checkpoint have to hold. docs/reference/checkpoint-format.md describes them.
namespace roundpipe {

// Whose state a file holds: that of a process that trains alone; of several nodes, what they have in common, or what
// one of them has for itself; or, of any, what belongs to the weights.
enum class StateKind { kAlone, kCommon, kRank, kWeights };

// Throws Error that begins "[where]" and names the field, unless `state` has the fields of its kind, with types and
// numbers in their ranges, and values that can be decoded from `tensors`.
void check_state(const nlohmann::json& state, StateKind kind, const saving::StoredSection& tensors,
                 const std::string& where);

// Throws Error, naming the parameter, unless the ranges in the states of several nodes follow each other and end where
// the parameter does. `sections`: what each rank has for itself.
void check_ranges(const std::vector<nlohmann::json>& states, const std::vector<saving::StoredSections>& sections,
                  const saving::StoredSection& weights, const std::string& folder);

}  // namespace roundpipe
