#include <roundpipe/api/loss.h>

#include <atomic>
#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe {

namespace {

class CheckedLoss final : public runtime::Loss {
 public:
  CheckedLoss(LossFunction function, bool refuses_nan) : function_(std::move(function)), refuses_nan_(refuses_nan) {}

  std::vector<at::Tensor> operator()(const runtime::Values& outputs, const runtime::Values& label,
                                     const runtime::LayerContext& /*context*/) override {
    std::vector<at::Tensor> losses = function_(outputs, label);
    if (losses.empty()) throw std::invalid_argument("[loss] the loss function returned no loss, expected at least one");
    size_t others = 0;
    if (!count_.compare_exchange_strong(others, losses.size()) && others != losses.size()) {
      throw std::invalid_argument(concat("[loss] the loss function returned ", losses.size(),
                                         " losses for one microbatch and ", others,
                                         " for another, expected the same number for each"));
    }
    for (const at::Tensor& loss : losses) {
      if (!loss.defined() || loss.numel() != 1) {
        throw std::invalid_argument(concat("[loss] the loss function returned ",
                                           loss.defined() ? concat("a tensor of shape ", loss.sizes()) : "no tensor",
                                           ", expected a scalar; reduce the loss, for example with .mean()"));
      }
      if (refuses_nan_ && loss.isnan().item<bool>()) throw Error(nan_loss(""));
    }
    return losses;
  }

 private:
  const LossFunction function_;
  const bool refuses_nan_;
  std::atomic<size_t> count_{0};  // of losses of a microbatch; 0: not known yet
};

}  // namespace

std::shared_ptr<runtime::Loss> make_loss(LossFunction function, bool refuses_nan) {
  return std::make_shared<CheckedLoss>(std::move(function), refuses_nan);
}

std::string nan_loss(const std::string& which) {
  return concat(
      "[forward_backward] the loss", which,
      " is NaN; the batch's gradients are dropped; check the data, lower the learning rate, make the model with "
      "check_loss = false, or set ROUNDPIPE_CHECK_LOSS=0");
}

}  // namespace roundpipe
