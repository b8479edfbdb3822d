#pragma once

#include <cstdint>
#include <functional>

namespace roundpipe {

// The factor of the learning rate at step number `step` (0, 1, ...): each group of an optimizer has its first learning
// rate times the factor. A function of the step alone, so a run that resumes needs only the number of steps.
using LearningRate = std::function<double(int64_t step)>;

// These throw std::invalid_argument for a negative number of steps or a `floor` outside of [0, 1].

// 1 at every step.
LearningRate constant_rate();
// Rises from 1 / warmup_steps to 1 over the first `warmup_steps` steps, and stays.
LearningRate warmup_rate(int64_t warmup_steps);
// Rises like warmup_rate, then falls in a straight line to `floor` at step `total_steps`, and stays there.
LearningRate linear_rate(int64_t warmup_steps, int64_t total_steps, double floor = 0);
// Rises like warmup_rate, then falls along half a cosine to `floor` at step `total_steps`, and stays there.
LearningRate cosine_rate(int64_t warmup_steps, int64_t total_steps, double floor = 0);

// Falls to `gamma` times what it was every `step_size` steps, as torch.optim.lr_scheduler.StepLR does; the StepLR of
// libtorch, whose first step() changes nothing, falls one step later each time. Throws std::invalid_argument for
// another `step_size` than a positive one, and for a `gamma` that is negative or no number.
LearningRate step_rate(int64_t step_size, double gamma = 0.1);

}  // namespace roundpipe
