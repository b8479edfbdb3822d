#pragma once

#include <optional>

namespace roundpipe {

class GradScaler;  // above the engine, which never looks into it

// Whose norm is compared with max_grad_norm.
enum class ClipBy {
  kNorm,         // that of the step's gradients: every update waits for all of them
  kLastNorm,     // of the step before, so that nothing waits: for an optimizer that uses gradients at once. The first
                 // step, before which there is none, uses its gradients as they are.
  kMeasuredNorm  // what Optimizer::measure_gradients has found for the same batch: the bits of kNorm in two passes, for
                 // an optimizer that uses gradients at once
};

// As programs in Python give it, and as nodes tell each other.
const char* name_of(ClipBy clip_by);

// Options of one step of an optimizer.
struct StepOptions {
  // Whether the next call still reads the weights from before this step, and the one after it reads this step's: then
  // the update runs while the next batch computes, and staleness is exactly one. Otherwise the next call reads the new
  // weights.
  bool asynchronous = true;
  // Gradients whose norm over the whole model is larger are scaled down to it, a positive number. Infinity only
  // measures the norm. Unset: they are used as they are.
  std::optional<double> max_grad_norm = std::nullopt;
  ClipBy clip_by = ClipBy::kNorm;
  // What scaled the losses: gradients are unscaled, a step with inf or NaN changes nothing, and the scale is updated.
  GradScaler* scaler = nullptr;
  // With several nodes, the factor of gradients that were added over all of them. Unset: 1 / nodes, the mean, as in
  // torch's DistributedDataParallel; 1 suits losses that are divided by a count over all nodes already.
  std::optional<double> gradient_factor = std::nullopt;
};

// Throws std::invalid_argument for a norm that is not positive, another norm to clip by without it, and for a factor
// that is no number or, unless there are `several_nodes`, not 1.
void check(const StepOptions& options, bool several_nodes);
// Throws std::invalid_argument: several nodes train the model.
[[noreturn]] void refuse_two_passes(const char* where);
// Throws std::invalid_argument unless gradients are clipped by their own norm: they are all there before the update.
void require_own_norm(const StepOptions& options);

}  // namespace roundpipe
