#pragma once

#include <functional>
#include <string>

namespace roundpipe::runtime {
class Pipeline;
}

namespace roundpipe {

// As many microbatches as a call may have whose number is chosen.
inline constexpr int kMostMicrobatches = 256;

// A chosen number of microbatches, and the reason, worded for the user.
struct MicrobatchChoice {
  int count = 0;
  std::string reason;
};

// Chooses the number of microbatches of a model's steps: the fewest whose predicted step is nearly the shortest.
//
// The predicted step follows from the layers' costs, measured or estimated; a microbatch of half the rows is taken to
// cost half as much. Estimated costs say nothing of transfers, which few microbatches cannot hide: then the number is
// at least default_microbatches(). Deterministic.
//
// `most`: as many as the batch allows. `groups`: of gradients, see RunOptions. `fits`: whether a step with so many
// microbatches fits in memory; what it throws is thrown.
MicrobatchChoice choose_microbatches(const runtime::Pipeline& pipeline, int most, int groups,
                                     const std::function<bool(int)>& fits);

}  // namespace roundpipe
