#include <roundpipe/optim/dispatch.h>

#include <doctest/doctest.h>

using namespace roundpipe::optim;

TEST_CASE("dispatch: every instruction set has kernels") {
  for (const std::string& set : instruction_sets()) {
    set_instruction_set(set);
    CHECK((current_kernels().update != nullptr));
  }
}
