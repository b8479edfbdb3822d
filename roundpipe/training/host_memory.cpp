#include <roundpipe/training/host_memory.h>

#include <algorithm>
#include <span>
#include <unordered_set>
#include <utility>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/memory/gradient_room.h>
#include <roundpipe/optim/block_optimizer.h>
#include <roundpipe/optim/masters.h>
#include <roundpipe/optim/muon_parameters.h>
#include <roundpipe/simulate/memory_simulator.h>
#include <roundpipe/storage/division.h>

namespace roundpipe {

namespace {

// What takes the least, while nobody knows which optimizer it will be.
OptimizerMemory least() { return {.algorithm = optim::Algorithm::kSGD, .gradients_at_once = true}; }

// Of a model whose blocks have such parameters, what the disk holds.
void move_to_disk(const std::vector<std::vector<simulate::ParameterSize>>& blocks, const OptimizerMemory& optimizer,
                  simulate::HostMemory& host) {
  const bool with_masters = optimizer.disk.holds == DiskHolds::kMasters;
  std::vector<int64_t> moments, masters, held;
  for (const auto& block : blocks) {
    const simulate::HostMemory own = simulate::predict_host(std::span(&block, 1));
    moments.push_back(own.moments / optimizer.nodes);
    masters.push_back(with_masters ? own.masters / optimizer.nodes : 0);
    held.push_back(moments.back() + masters.back());
  }
  const storage::Division division = storage::divide(held, optimizer.disk.memory_bytes, optimizer.disk.held());
  const auto beyond = [&](const std::vector<int64_t>& of_blocks) {
    int64_t bytes = 0;
    for (size_t b = 0; b < of_blocks.size(); ++b) bytes += division.in_memory[b] ? 0 : of_blocks[b];
    return bytes - division.in_window(bytes, division.disk_bytes);
  };
  host.moments_on_disk = beyond(moments);
  host.masters_on_disk = beyond(masters);
  host.moments -= host.moments_on_disk;
  host.masters -= host.masters_on_disk;
}

std::string smaller(const HostPrediction& wanted, int64_t budget_bytes,
                    const std::function<HostPrediction(const OptimizerMemory&)>& predict,
                    const std::optional<OptimizerMemory>& optimizer) {
  const auto ways = optimizer ? narrower_formats(*optimizer, Steps::kUnknown) : std::vector<NarrowerOptimizer>();
  for (const NarrowerOptimizer& way : ways) {
    if (predict(way.optimizer).total() > budget_bytes) continue;
    std::string changes;
    for (const auto& [option, value] : way.changes)
      changes += concat(changes.empty() ? "" : " and ", frontend().option(option, value));
    const bool at_once = way.optimizer.gradients_at_once && !optimizer->gradients_at_once;
    return concat(changes, " in the optimizer", at_once ? ", with synchronous steps" : "");
  }
  std::string raised = frontend().option("host_memory", format_bytes(wanted.total()));
  if (!optimizer)
    raised += concat(" (with AdamW ", frontend().quoted(format_bytes(predict(OptimizerMemory()).total())), ")");
  if (wanted.weights + wanted.values <= budget_bytes && wanted.gradients > 0) {
    return concat("train adapters only (the frozen weights take ", format_bytes(wanted.weights), "), or ", raised);
  }
  return raised;
}

}  // namespace

std::vector<NarrowerOptimizer> narrower_formats(const OptimizerMemory& optimizer, Steps steps,
                                                std::optional<c10::ScalarType> weights) {
  std::vector<NarrowerOptimizer> levels{{optimizer, {}}};
  const auto narrow = [&](auto format, auto from, auto to, const char* option, const char* value) {
    if (optimizer.format.*format != from) return;
    NarrowerOptimizer next = levels.back();
    next.optimizer.format.*format = to;
    next.changes.emplace_back(option, value);
    levels.push_back(std::move(next));
  };
  if (optimizer.algorithm == optim::Algorithm::kAdam || optimizer.algorithm == optim::Algorithm::kAdamW) {
    narrow(&optim::StateFormat::moments, optim::MomentFormat::kFloat32, optim::MomentFormat::kBlockwise8Bit, "moments",
           "8bit");
  }
  if (!weights || optim::has_masters(*weights, optim::MasterFormat::k24Bit)) {
    narrow(&optim::StateFormat::masters, optim::MasterFormat::kFloat32, optim::MasterFormat::k24Bit, "masters",
           "24bit");
  }
  std::vector<NarrowerOptimizer> ways(levels.begin() + 1, levels.end());
  const bool may_be_at_once = steps != Steps::kAsynchronous && weights != at::kHalf;
  if (optimizer.gradients_at_once || !may_be_at_once) return ways;
  for (size_t i = 0; i < levels.size(); ++i) {
    NarrowerOptimizer way = levels[i];
    way.optimizer.gradients_at_once = true;
    way.changes.emplace(way.changes.begin(), "gradients", "at_once");
    ways.insert(steps == Steps::kSynchronous ? ways.begin() + static_cast<std::ptrdiff_t>(2 * i) : ways.end(),
                std::move(way));
  }
  return ways;
}

OptimizerMemory of_command(OptimizerMemory optimizer, const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                           const std::vector<std::vector<std::string>>& classes) {
  if (optimizer.algorithm != optim::Algorithm::kMuon) return optimizer;
  optim::Hyperparameters by_adamw = optimizer.options;
  by_adamw.use_muon = false;
  std::unordered_set<const c10::TensorImpl*> others;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    const std::span<const std::string> own = i < classes.size() ? classes[i] : std::span<const std::string>();
    if (!optim::is_for_muon(name, tensor.sizes(), own)) others.insert(tensor.unsafeGetTensorImpl());
  }
  optimizer.options_of = [by_adamw, others = std::move(others)](const at::Tensor& parameter) {
    return others.contains(parameter.unsafeGetTensorImpl()) ? &by_adamw : nullptr;
  };
  return optimizer;
}

simulate::HostMemory host_memory_of(const std::vector<std::vector<at::Tensor>>& blocks,
                                    const OptimizerMemory& optimizer, bool trains) {
  std::vector<std::vector<simulate::ParameterSize>> sizes;
  for (const std::vector<at::Tensor>& block : blocks) {
    auto& of_block = sizes.emplace_back();
    for (const at::Tensor& tensor : block) {
      const std::optional<c10::ScalarType> master =
          optim::remainder_dtype(tensor.scalar_type(), optimizer.format.masters);
      const optim::Hyperparameters* const own = optimizer.options_of ? optimizer.options_of(tensor) : nullptr;
      of_block.push_back({.elements = tensor.numel(),
                          .element_bytes = static_cast<int64_t>(tensor.element_size()),
                          .master_bytes = master ? static_cast<int64_t>(c10::elementSize(*master)) : 0,
                          .moment_bytes = optim::state_bytes(optimizer.algorithm, own ? *own : optimizer.options,
                                                             optimizer.format.moments, tensor.sizes()),
                          .trained = trains && tensor.requires_grad()});
    }
  }
  simulate::HostMemory host = simulate::predict_host(sizes);
  host.masters /= optimizer.nodes;
  host.moments /= optimizer.nodes;
  if (trains && optimizer.gradients_at_once) {
    std::vector<int64_t> gradients;
    for (const auto& block : sizes) gradients.push_back(simulate::predict_host(std::span(&block, 1)).gradients);
    host.gradients = memory::gradient_room_bytes(gradients);
  }
  if (trains && optimizer.disk.is_on()) move_to_disk(sizes, optimizer, host);
  return host;
}

int64_t wider_gradient_bytes(const at::Tensor& parameter) {
  return parameter.requires_grad() && parameter.element_size() == 2 ? 2 * parameter.numel() : 0;
}

void require_host(const char* where, const std::string& name, int64_t budget_bytes,
                  const std::function<HostPrediction(const OptimizerMemory&)>& predict,
                  const std::optional<OptimizerMemory>& optimizer) {
  const HostPrediction wanted = predict(optimizer.value_or(least()));
  if (wanted.total() <= budget_bytes) return;
  throw BudgetExceeded(concat(memory_table(concat("[", where, "] ", name, " does not fit on the host:"),
                                           rows_of(wanted), {{"host_memory", budget_bytes}}),
                              "\nsmallest change that would fit: ", smaller(wanted, budget_bytes, predict, optimizer)));
}

}  // namespace roundpipe
