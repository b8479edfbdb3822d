#include <roundpipe/core/skipped_steps.h>

#include <roundpipe/core/error.h>

namespace roundpipe {

void SkippedSteps::add(int64_t step, bool skipped, double scale) {
  if (!skipped) return;
  ++count_;
  if (scale > kLeastScale) return;
  throw Error(concat("[train] a gradient of step ", step, " is inf or NaN although its loss was scaled by ", scale,
                     ", and ", count_,
                     " steps were skipped so far, expected finite gradients by then: values of the "
                     "model do not fit float16; train it in bfloat16 (--dtype bfloat16), or with a smaller "
                     "--learning-rate if its first steps were made"));
}

}  // namespace roundpipe
