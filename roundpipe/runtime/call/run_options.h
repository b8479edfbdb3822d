#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include <c10/core/Device.h>

#include <roundpipe/schedule/plan.h>

namespace roundpipe::runtime {

// How one tensor of a batch is cut into microbatches.
struct Cut {
  enum class Kind {
    kAutomatic,  // along dimension 0 if the tensor has as many rows as the batch; otherwise every microbatch gets it
                 // whole
    kAlong,      // along `dimension`, as at::tensor_split cuts: larger parts first
    kWhole,      // every microbatch gets it whole
  };
  Kind kind = Kind::kAutomatic;
  int64_t dimension = 0;

  static Cut along(int64_t dimension) { return {Kind::kAlong, dimension}; }
  static Cut whole() { return {Kind::kWhole, 0}; }
};

// How a call runs: as the planner chooses; in these stages, with devices in turn from where the last plan stopped; or
// by this plan, including its devices.
using Route = std::variant<std::monostate, schedule::Stages, schedule::Plan>;

// The order in which gradients of a parameter that several layers share are added.
enum class TiedGradAccumulation {
  kLayer,       // over each layer's microbatches first, then over the layers (see BlockSum)
  kMicrobatch,  // over each microbatch's layers first, then over the microbatches (see memory::TiedSum)
};

// How the losses of microbatches make up the loss of their batch.
enum class LossReduction {
  kSum,   // they are added
  kMean,  // each is a mean over its rows, and has the weight of its share of the batch's rows
};

}  // namespace roundpipe::runtime

namespace roundpipe {

using runtime::Cut;
using runtime::LossReduction;

// See RunOptions::microbatches.
inline constexpr int kAutoMicrobatches = -1;

// Options of one call. A model has its own, which a call uses unless it is given others.
struct RunOptions {
  // Whether outputs carry gradients; unset: the grad mode at the call.
  std::optional<bool> requires_grad = std::nullopt;
  // The number of microbatches of a batch; unset: one more than there are devices, or fewer for a batch of fewer rows.
  // kAutoMicrobatches: the planner chooses, once, for the first training call; see Model::auto_microbatches.
  std::optional<int> microbatches = std::nullopt;
  // Microbatches are cut into so many consecutive groups, and gradients are summed within each group, then over the
  // groups. Devices may share a trainable layer by whole groups. See schedule::GradientGroups.
  int gradient_groups = 1;
  // kStage keeps only a stage's inputs until its backward; kLayer keeps those of every layer and runs the backward
  // layer by layer, in less memory: its stages have one layer each, also where longer ones are given.
  RecomputeGrain recompute_grain = RecomputeGrain::kStage;
  // Whether a recomputation draws the same random numbers as the forward.
  bool preserve_rng_state = true;
  runtime::TiedGradAccumulation tied_grad_accumulation = runtime::TiedGradAccumulation::kLayer;
  // Whether training goes on when a device fails: its jobs run again on the others, with the same bits; what they need
  // for that stays on the host.
  bool fault_tolerant = false;
  // Of every N-th training call, one job, chosen at random, runs on a second device, too, and the bits are compared; 0:
  // none. A device that is found wrong is named in an error (WrongBits) and taken out; if the runs do not tell which it
  // is, the call ends with an Error. With one device, the job runs there twice, which finds less: docs/reliability.md.
  int verify_every = 0;
  // Of a LanguageModel whose loss_chunk_tokens is 0: see ops::LinearCrossEntropyOptions. A checkpoint restores it,
  // since it belongs to the bits; unset for other models.
  std::optional<int64_t> chunk_logit_bytes = std::nullopt;
  // Where merged outputs lie.
  c10::Device output_device = c10::kCPU;
  // How the tensors of the inputs and of the labels are cut, in the order of TensorsOf; those beyond the end of the
  // list are cut automatically. For inputs, the rows of the batch are those of the first tensor with Cut::along, else
  // the most frequent size of dimension 0, of which the first wins a tie. An input of another size, such as the number
  // of microbatches, goes whole to every microbatch, with a warning unless it has one row. A label is never taken whole
  // for its size: it has to have the rows of the batch, also in Microbatches and if there is only one microbatch, apart
  // from scalars and single rows beside other labels; Cut::whole() says that one has no rows.
  std::vector<Cut> cut_inputs = {};
  std::vector<Cut> cut_labels = {};
  // How the losses of microbatches make up the loss of the batch. Unset: the first microbatch tells; for that, the loss
  // function is called on parts of it, too, see Model::forward_backward.
  std::optional<LossReduction> loss_reduction = std::nullopt;
  // The stages or the plan of the step; by default, the planner chooses.
  runtime::Route route = {};
};

// The number of microbatches of a call that asks for none.
constexpr int default_microbatches(int devices) { return devices + 1; }

// Throws std::invalid_argument for a number that is too small.
void check(const RunOptions& options);

}  // namespace roundpipe
