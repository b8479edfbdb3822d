#include <roundpipe/api/learning_rate.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe {

namespace {

void check(int64_t warmup_steps, int64_t total_steps, double floor) {
  if (warmup_steps < 0 || total_steps < warmup_steps) {
    throw std::invalid_argument(concat("[learning rate] ", warmup_steps, " steps of warmup and ", total_steps,
                                       " steps in all, expected 0 <= warmup <= all"));
  }
  if (!(floor >= 0 && floor <= 1)) {
    throw std::invalid_argument(concat("[learning rate] the floor is ", floor, ", expected a factor from 0 to 1"));
  }
}

// `fall` maps the share of the steps after the warmup, from 0 to 1, to a factor from 1 to 0.
LearningRate falling(int64_t warmup_steps, int64_t total_steps, double floor, double (*fall)(double)) {
  check(warmup_steps, total_steps, floor);
  return [=, warmup = warmup_rate(warmup_steps)](int64_t step) {
    if (step < warmup_steps) return warmup(step);
    const int64_t length = total_steps - warmup_steps;
    const double share =
        length == 0 ? 1 : std::min(1.0, static_cast<double>(step - warmup_steps) / static_cast<double>(length));
    return floor + (1 - floor) * fall(share);
  };
}

}  // namespace

LearningRate constant_rate() { return warmup_rate(0); }

LearningRate warmup_rate(int64_t warmup_steps) {
  check(warmup_steps, warmup_steps, 0);
  return [warmup_steps](int64_t step) {
    return step < warmup_steps ? static_cast<double>(step + 1) / static_cast<double>(warmup_steps) : 1.0;
  };
}

LearningRate linear_rate(int64_t warmup_steps, int64_t total_steps, double floor) {
  return falling(warmup_steps, total_steps, floor, [](double share) { return 1 - share; });
}

LearningRate step_rate(int64_t step_size, double gamma) {
  if (step_size < 1 || !(gamma >= 0)) {
    throw std::invalid_argument(concat("[learning rate] a factor of ", gamma, " every ", step_size,
                                       " steps, expected a factor that is not negative, and 1 step or more"));
  }
  return [=](int64_t step) { return std::pow(gamma, static_cast<double>(step / step_size)); };
}

LearningRate cosine_rate(int64_t warmup_steps, int64_t total_steps, double floor) {
  return falling(warmup_steps, total_steps, floor,
                 [](double share) { return 0.5 * (1 + std::cos(std::numbers::pi * share)); });
}

}  // namespace roundpipe
