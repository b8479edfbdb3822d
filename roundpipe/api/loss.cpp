#include <roundpipe/api/loss.h>

#include <atomic>
#include <stdexcept>

#include <roundpipe/core/error.h>
#include <roundpipe/runtime/call/loss_reduction.h>

namespace roundpipe {

namespace {

// The function, whose results are scalars, and as many for each microbatch.
LossFunction checked(LossFunction function) {
  const auto count = std::make_shared<std::atomic<size_t>>(0);  // of losses of a microbatch; 0: not known yet
  return [function = std::move(function), count](const runtime::Values& outputs, const runtime::Values& label) {
    std::vector<at::Tensor> losses = function(outputs, label);
    if (losses.empty()) throw std::invalid_argument("[loss] the loss function returned no loss, expected at least one");
    size_t others = 0;
    if (!count->compare_exchange_strong(others, losses.size()) && others != losses.size()) {
      throw std::invalid_argument(concat("[loss] the loss function returned ", losses.size(),
                                         " losses for one microbatch and ", others,
                                         " for another, expected the same number for each"));
    }
    for (const at::Tensor& loss : losses) {
      if (loss.defined() && loss.numel() == 1) continue;
      throw std::invalid_argument(concat("[loss] the loss function returned ",
                                         loss.defined() ? concat("a tensor of shape ", loss.sizes()) : "no tensor",
                                         ", expected a scalar; reduce the loss, for example with .mean()"));
    }
    return losses;
  };
}

}  // namespace

std::shared_ptr<runtime::Loss> make_loss(LossFunction function, std::vector<runtime::LossRows> microbatches,
                                         std::optional<LossReduction> reduction) {
  return std::make_shared<runtime::TriedLoss>(checked(std::move(function)), std::move(microbatches), reduction);
}

}  // namespace roundpipe
