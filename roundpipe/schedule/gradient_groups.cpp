#include <roundpipe/schedule/gradient_groups.h>

namespace roundpipe::schedule {

std::vector<int> gradient_parts(const Plan& plan, int gradient_groups) {
  const GradientGroups groups(plan.microbatches, gradient_groups);
  std::vector<int> parts(static_cast<std::size_t>(plan.layers), 0);
  for (const Job& job : plan.jobs) {
    if (job.phase == Phase::kForward) continue;
    const int sent = job.microbatches.first == 0 ? 1 : groups.groups_of(job.microbatches).size();
    for (int l = job.layers.first; l < job.layers.last; ++l) parts[static_cast<std::size_t>(l)] += sent;
  }
  return parts;
}

}  // namespace roundpipe::schedule
