#pragma once

#include <cstddef>

namespace roundpipe::schedule {

// Urgency class of a transfer on a link, for the engine and the simulator. Lower values go first; within a class, the
// order of submission decides.
enum class Priority { kActivation, kBoundaryGradient, kWeight, kParameterGradient };
inline constexpr std::size_t kPriorities = 4;

inline const char* name_of(Priority priority) {
  switch (priority) {
    case Priority::kActivation:
      return "activations";
    case Priority::kBoundaryGradient:
      return "boundary gradients";
    case Priority::kWeight:
      return "weights";
    case Priority::kParameterGradient:
      return "parameter gradients";
  }
  return "?";
}

}  // namespace roundpipe::schedule
