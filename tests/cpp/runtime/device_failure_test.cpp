#include <string>

#include <doctest/doctest.h>

#include "support/model.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;

namespace device_failure_test {

constexpr int64_t kWidth = 4;
constexpr int64_t kRows = 3;
constexpr int kMicrobatches = 3;

TEST_SUITE("device failures") {
  TEST_CASE("an inference goes on, too") {
    const Batch batch = make_batch(kMicrobatches, kRows, kWidth);
    RunOptions options;
    options.fault_tolerant = true;
    options.requires_grad = false;
    std::vector<Values> expected;
    for (int at = 0; at <= 8; ++at) {
      use_devices(at == 0 ? "virtual:2" : "virtual:2,fail=1:error@" + std::to_string(at));
      PipedModel piped("m", all_kinds(kWidth));
      std::vector<Values> outputs;
      for (int round = 0; round < 2; ++round) {
        roundpipe::schedule::Stages stages;
        stages.forward = ascending({0, 2, 3, 5, 6});
        outputs = piped.pipeline().forward(batch.inputs, along(stages, options)).microbatches;
      }
      if (at == 0) expected = outputs;
      for (size_t m = 0; m < outputs.size(); ++m) {
        CHECK(same_bits(outputs[m].tensors[0], expected[m].tensors[0]));
      }
    }
  }
}

}  // namespace device_failure_test
