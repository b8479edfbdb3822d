#pragma once

#include <string>
#include <vector>

#include <roundpipe/schedule/cut.h>

namespace roundpipe::compare {

// Plans of other systems' schedules, for comparison. All recompute each stage before its backward. The last layer is
// the head. It runs on the device of the last stage, as one fused visit after that stage's forward. Where all forwards
// come before all backwards (GPipe, looped BFS), it is part of the last stage instead, in both directions.

enum class Baseline {
  kGPipe,              // all forwards, then all backwards (arXiv:1811.06965)
  kOneForwardOneBack,  // 1F1B with a flush (arXiv:2006.09503)
  kInterleaved,        // interleaved 1F1B: several chunks per device (arXiv:2104.04473)
  kLoopedBfs,          // breadth first over the chunks (arXiv:2211.05953)
  kPublished,          // the published RoundPipe: rounds of one microbatch per device; devices take turns
};

// Layers in each stage, without the head; 0 = a stage without layers.
struct BaselineSizes {
  std::vector<int> pipeline;  // GPipe and 1F1B: one stage per device
  std::vector<int> chunks;    // interleaved and looped: a multiple of the devices, chunk i on device i % devices
  std::vector<int> forward;   // published: forward stages, first layers first
  std::vector<int> backward;  // published: backward stages, last layers first

  bool operator==(const BaselineSizes&) const = default;
};

// Makes balanced sizes for models without published ones: stages balanced by recompute + backward, as many chunks per
// device as the layers allow, and greedy stages for the published plan. Throws std::invalid_argument for bad costs.
BaselineSizes default_sizes(const schedule::LayerCosts& costs, int devices);

// Makes the plan of one step. `first_device` runs the first job of a published plan, where devices keep taking turns
// from step to step; the other plans start on device 0.
// Throws std::invalid_argument for arguments out of range, for sizes that do not add up to the layers below the head or
// do not match the devices, and for an interleaved plan whose microbatches are not a multiple of the devices.
schedule::Plan baseline_plan(Baseline baseline, const BaselineSizes& sizes, int layers, int devices, int microbatches,
                             int first_device = 0);

}  // namespace roundpipe::compare
