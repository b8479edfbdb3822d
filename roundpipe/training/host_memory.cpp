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
#include <roundpipe/optim/muon_parameters.h>
#include <roundpipe/simulate/memory_simulator.h>
#include <roundpipe/storage/division.h>

namespace roundpipe {

namespace {

// What any optimizer takes at least, while nobody knows which one it will be.
constexpr optim::Algorithm kLeast = optim::Algorithm::kSGD;

// The first change of formats that fits, the one that costs least first; `at_once`: and of how gradients are used.
std::optional<std::string> narrower_format(OptimizerMemory optimizer, bool at_once,
                                           const std::function<bool(const OptimizerMemory&)>& fits) {
  std::string changes;
  const auto change = [&](bool applies, const char* option, const char* value) {
    if (!applies) return false;
    changes += concat(changes.empty() ? "" : " and ", frontend().option(option, value));
    return fits(optimizer);
  };
  const auto told = [&] { return concat(changes, " in the optimizer", at_once ? ", with synchronous steps" : ""); };
  if (at_once) {
    if (optimizer.gradients_at_once || optimizer.nodes > 1) return std::nullopt;
    optimizer.gradients_at_once = true;
    if (change(true, "gradients", "at_once")) return told();
  }
  const bool is_adam =
      optimizer.algorithm == optim::Algorithm::kAdam || optimizer.algorithm == optim::Algorithm::kAdamW;
  const bool has_wide_moments = optimizer.format.moments == optim::MomentFormat::kFloat32;
  if (is_adam) optimizer.format.moments = optim::MomentFormat::kBlockwise8Bit;
  if (change(is_adam && has_wide_moments, "moments", "8bit")) return told();
  const bool has_wide_masters = optimizer.format.masters == optim::MasterFormat::kFloat32;
  optimizer.format.masters = optim::MasterFormat::k24Bit;
  if (change(has_wide_masters, "masters", "24bit")) return told();
  return std::nullopt;
}

std::string smaller(const HostPrediction& wanted, int64_t budget_bytes,
                    const std::function<HostPrediction(const OptimizerMemory&)>& predict,
                    const std::optional<OptimizerMemory>& optimizer) {
  if (optimizer) {
    for (const bool at_once : {false, true}) {
      const std::optional<std::string> change = narrower_format(
          *optimizer, at_once, [&](const OptimizerMemory& less) { return predict(less).total() <= budget_bytes; });
      if (change) return *change;
    }
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
  if (trains && optimizer.disk.is_on()) {
    std::vector<int64_t> moments;
    for (const auto& block : sizes)
      moments.push_back(simulate::predict_host(std::span(&block, 1)).moments / optimizer.nodes);
    const storage::Division division = storage::divide(moments, optimizer.disk.memory_bytes);
    host.moments_on_disk = std::max<int64_t>(host.moments - division.total_memory_bytes(), 0);
    host.moments -= host.moments_on_disk;
  }
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
