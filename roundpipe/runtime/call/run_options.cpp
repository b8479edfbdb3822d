#include <roundpipe/runtime/call/run_options.h>

#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe {

void check(const RunOptions& options) {
  const auto require = [](const char* name, int number, int least) {
    if (number >= least) return;
    throw std::invalid_argument(concat("[options] ", name, " is ", number, ", expected at least ", least));
  };
  if (options.microbatches && *options.microbatches != kAutoMicrobatches)
    require("microbatches", *options.microbatches, 1);
  require("gradient_groups", options.gradient_groups, 1);
  require("verify_every", options.verify_every, 0);
}

}  // namespace roundpipe
