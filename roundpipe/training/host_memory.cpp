#include <roundpipe/training/host_memory.h>

#include <algorithm>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/optim/block_optimizer.h>
#include <roundpipe/simulate/memory_simulator.h>

namespace roundpipe {

namespace {

// What any optimizer takes at least, while nobody knows which one it will be.
constexpr optim::Algorithm kLeast = optim::Algorithm::kSGD;

std::string smaller(const HostPrediction& wanted, int64_t budget_bytes,
                    const std::function<HostPrediction(const OptimizerMemory&)>& predict,
                    const std::optional<OptimizerMemory>& optimizer) {
  const bool is_adam = optimizer && (optimizer->algorithm == optim::Algorithm::kAdam ||
                                     optimizer->algorithm == optim::Algorithm::kAdamW);
  const OptimizerMemory in_8bit{.moments = optim::MomentFormat::kBlockwise8Bit};
  if (is_adam && optimizer->moments == optim::MomentFormat::kFloat32 && predict(in_8bit).total() <= budget_bytes)
    return concat(frontend().option("moments", "8bit"), " in the optimizer");
  std::string raised = frontend().option("host_memory", format_bytes(wanted.total()));
  if (!optimizer)
    raised += concat(" (with AdamW ", frontend().quoted(format_bytes(predict(OptimizerMemory()).total())), ")");
  if (wanted.weights + wanted.values <= budget_bytes && wanted.gradients > 0) {
    return concat("train adapters only (the frozen weights take ", format_bytes(wanted.weights), "), or ", raised);
  }
  return raised;
}

}  // namespace

OptimizerMemory largest_optimizer(optim::Algorithm algorithm, const std::vector<optim::Hyperparameters>& groups,
                                  optim::MomentFormat moments) {
  const auto most = std::ranges::max_element(groups, {}, [&](const optim::Hyperparameters& options) {
    return optim::state_bytes(algorithm, options, moments, {1024, 1024});
  });
  return {algorithm, *most, moments};
}

simulate::HostMemory host_memory_of(const std::vector<std::vector<at::Tensor>>& blocks,
                                    const OptimizerMemory& optimizer, bool trains) {
  std::vector<std::vector<simulate::ParameterSize>> sizes;
  for (const std::vector<at::Tensor>& block : blocks) {
    auto& of_block = sizes.emplace_back();
    for (const at::Tensor& tensor : block) {
      const std::optional<c10::ScalarType> master = optim::remainder_dtype(tensor.scalar_type());
      of_block.push_back({.elements = tensor.numel(),
                          .element_bytes = static_cast<int64_t>(tensor.element_size()),
                          .master_bytes = master ? static_cast<int64_t>(c10::elementSize(*master)) : 0,
                          .moment_bytes = optim::state_bytes(optimizer.algorithm, optimizer.options, optimizer.moments,
                                                             tensor.sizes()),
                          .trained = trains && tensor.requires_grad()});
    }
  }
  simulate::HostMemory host = simulate::predict_host(sizes);
  host.masters /= optimizer.nodes;
  host.moments /= optimizer.nodes;
  return host;
}

int64_t wider_gradient_bytes(const at::Tensor& parameter) {
  return parameter.requires_grad() && parameter.element_size() == 2 ? 2 * parameter.numel() : 0;
}

void require_host(const char* where, const std::string& name, int64_t budget_bytes,
                  const std::function<HostPrediction(const OptimizerMemory&)>& predict,
                  const std::optional<OptimizerMemory>& optimizer) {
  const HostPrediction wanted = predict(optimizer.value_or(OptimizerMemory{.algorithm = kLeast}));
  if (wanted.total() <= budget_bytes) return;
  throw BudgetExceeded(concat(memory_table(concat("[", where, "] ", name, " does not fit on the host:"),
                                           rows_of(wanted), {{"host_memory", budget_bytes}}),
                              "\nsmallest change that would fit: ", smaller(wanted, budget_bytes, predict, optimizer)));
}

}  // namespace roundpipe
