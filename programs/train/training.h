#pragma once

#include "options.h"

namespace roundpipe::train {

// Trains as the options say, and returns the exit status of the program: 0, or 128 and the signal that stopped it.
// Options that do not fit the model, the tokens or a checkpoint are refused before weights are read, and so is being
// one of several processes that a launcher has started. The main thread. Throws std::invalid_argument for these, and
// Error and what torch throws for the rest.
int train(const Options& options);

}  // namespace roundpipe::train
