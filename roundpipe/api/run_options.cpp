#include <roundpipe/api/run_options.h>

#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe {

void check(const RunOptions& options) {
  const auto require = [](const char* name, int number) {
    if (number >= 1) return;
    throw std::invalid_argument(concat("[options] ", name, " is ", number, ", expected at least 1"));
  };
  if (options.microbatches) require("microbatches", *options.microbatches);
  require("gradient_groups", options.gradient_groups);
}

}  // namespace roundpipe
