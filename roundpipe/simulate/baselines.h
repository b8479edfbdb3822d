#pragma once

#include <string>
#include <vector>

#include <roundpipe/schedule/cut.h>

namespace roundpipe::simulate {

// Schedules of other systems as plans, to compare with. All recompute each stage before its backward. The last layer is
// the head: it follows the last stage on its device, forward and backward in one visit, or, where all forwards stand
// before all backwards (GPipe, looped BFS), with the forward and the backward of that stage.

enum class Baseline {
  kOneDevice,          // every layer on device 0
  kGPipe,              // all forwards, then all backwards (arXiv:1811.06965)
  kOneForwardOneBack,  // 1F1B with a flush (arXiv:2006.09503)
  kInterleaved,        // interleaved 1F1B: several chunks a device (arXiv:2104.04473)
  kLoopedBfs,          // breadth first over the chunks (arXiv:2211.05953)
  kPublished,          // the published RoundPipe: rounds of as many microbatches as devices, devices in turn
};
const char* baseline_name(Baseline baseline);

// Layers in each stage, without the head; 0 = a stage without layers.
struct BaselineSizes {
  std::vector<int> pipeline;  // GPipe and 1F1B: one stage a device
  std::vector<int> chunks;    // interleaved and looped: a multiple of the devices, chunk i on device i % devices
  std::vector<int> forward;   // published: forward stages, first layers first
  std::vector<int> backward;  // published: backward stages, last layers first

  bool operator==(const BaselineSizes&) const = default;
};

// Balanced sizes for layers that come without published ones: stages by recompute + forward + backward, as many chunks
// as there are whole layers for, greedy stages for the published plan.
BaselineSizes default_sizes(const schedule::LayerCosts& costs, int devices);

// The plan of one step. `first_device`: of the first job of a published plan, whose devices go on in turn from step to
// step; the others start on device 0.
// Throws std::invalid_argument for sizes that do not add up to the layers below the head, and for an interleaved plan
// whose microbatches are no multiple of the devices.
schedule::Plan baseline_plan(Baseline baseline, const BaselineSizes& sizes, int layers, int devices, int microbatches,
                             int first_device = 0);

}  // namespace roundpipe::simulate
