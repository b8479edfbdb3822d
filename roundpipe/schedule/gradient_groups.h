#pragma once

#include <algorithm>
#include <vector>

#include <roundpipe/schedule/plan.h>

namespace roundpipe::schedule {

// The microbatches of a step, cut into consecutive groups as torch.tensor_split cuts rows: the first ones are larger by
// one if the division leaves a rest. Gradients are summed group by group, so devices may share a trainable stage only
// by whole groups, and how they share it does not change a bit.
class GradientGroups {
 public:
  // Both at least 1. There are at most as many groups as microbatches.
  GradientGroups(int microbatches, int groups)
      : microbatches_(microbatches), count_(std::clamp(groups, 1, std::max(1, microbatches))) {}

  int count() const { return count_; }
  // The microbatches of consecutive groups.
  Range microbatches(Range groups) const { return {begin_of(groups.first), begin_of(groups.last)}; }
  int group_of(int microbatch) const {
    const int size = microbatches_ / count_, larger = microbatches_ % count_;
    const int in_larger = larger * (size + 1);
    return microbatch < in_larger ? microbatch / (size + 1) : larger + (microbatch - in_larger) / size;
  }
  // Whether a group, or the last one, ends before `microbatch`. True for 0 and for the number of microbatches.
  bool is_boundary(int microbatch) const {
    return microbatch == microbatches_ || begin_of(group_of(microbatch)) == microbatch;
  }
  // Whether these microbatches are whole groups.
  bool are_whole(Range microbatches) const { return is_boundary(microbatches.first) && is_boundary(microbatches.last); }
  // The groups of which a range, not empty, has microbatches.
  Range groups_of(Range microbatches) const {
    return {group_of(microbatches.first), group_of(microbatches.last - 1) + 1};
  }

 private:
  int begin_of(int group) const { return group * (microbatches_ / count_) + std::min(group, microbatches_ % count_); }

  int microbatches_;
  int count_;
};

// For each layer, how many sums of gradients the backward of a step sends to the host, where they are added: one for a
// job that begins with the first group, which adds up its groups itself; one for each group of another job.
std::vector<int> gradient_parts(const Plan& plan, int gradient_groups);

}  // namespace roundpipe::schedule
