#include <cstdio>
#include <exception>
#include <stdexcept>

#include "options.h"
#include "training.h"

int main(int argc, char** argv) {
  roundpipe::train::Options options;
  if (const std::optional<int> status = roundpipe::train::read_options(argc, argv, options)) return *status;
  try {
    return roundpipe::train::train(options);
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return roundpipe::train::kMistakeStatus;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
