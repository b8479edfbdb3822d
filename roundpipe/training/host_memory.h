#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/optim/hyperparameters.h>
#include <roundpipe/storage/disk_options.h>
#include <roundpipe/training/memory_prediction.h>

namespace roundpipe {

// A fused optimizer, as far as its memory depends on it.
struct OptimizerMemory {
  optim::Algorithm algorithm = optim::Algorithm::kAdam;
  optim::Hyperparameters options = {};
  optim::StateFormat format = {};
  int nodes = 1;  // processes that share its state
  DiskOptions disk = {};
  bool gradients_at_once = false;
  // Of one parameter; null, or returns null: `options`.
  std::function<const optim::Hyperparameters*(const at::Tensor&)> options_of = nullptr;
};

// The optimizer of a training command, for parameters under these names: AdamW steps those that Muon is not for.
// `classes`: as of optim::is_for_muon, of each parameter; may be shorter.
OptimizerMemory of_command(OptimizerMemory optimizer, const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                           const std::vector<std::vector<std::string>>& classes);

// The model's share of HostPrediction. `blocks`: parameters and buffers whose memory is one block; if any of them is
// trained, there are gradients for all. `trains`: false: nothing is trained, whatever requires_grad says.
simulate::HostMemory host_memory_of(const std::vector<std::vector<at::Tensor>>& blocks,
                                    const OptimizerMemory& optimizer, bool trains = true);

// What a parameter's gradient takes beyond the parameter's width if it is in fp32.
int64_t wider_gradient_bytes(const at::Tensor& parameter);

// When the next call reads the weights of a step.
enum class Steps { kUnknown, kSynchronous, kAsynchronous };

// An optimizer in formats that take less of the host, and the options that differ, as (name, value).
struct NarrowerOptimizer {
  OptimizerMemory optimizer;
  std::vector<std::pair<const char*, const char*>> changes;
};

// The formats in which `optimizer` takes less, in the order in which to try them. Gradients that are used at once need
// synchronous steps; as they change no state, they come before other formats where steps are known to be synchronous.
// `weights`: those of the model, if they are known: some have no masters of fewer bits, and the losses of fp16 are
// scaled, for which all gradients have to be there.
std::vector<NarrowerOptimizer> narrower_formats(const OptimizerMemory& optimizer, Steps steps,
                                                std::optional<c10::ScalarType> weights = std::nullopt);

// Throws BudgetExceeded, with the smallest change that would fit, if what `predict` says of `optimizer` is more than
// `budget_bytes`. `optimizer`: none: nobody knows which it will be.
void require_host(const char* where, const std::string& name, int64_t budget_bytes,
                  const std::function<HostPrediction(const OptimizerMemory&)>& predict,
                  const std::optional<OptimizerMemory>& optimizer);

}  // namespace roundpipe
