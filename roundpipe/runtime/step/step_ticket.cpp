#include <roundpipe/runtime/step/step_ticket.h>

#include <ATen/core/grad_mode.h>

namespace roundpipe::runtime {

using memory::GradientBlockPtr;

StepTicket::StepTicket(std::shared_ptr<ModelState> model, std::vector<GradientBlockPtr> gradients,
                       std::vector<std::vector<at::Tensor>> optimizer_parameters)
    : model_(std::move(model)),
      gradients_(std::move(gradients)),
      optimizer_parameters_(std::move(optimizer_parameters)) {}

bool StepTicket::hand_over() {
  for (const GradientBlockPtr& block : gradients_) {
    if (!block) continue;
    block->landed->wait_complete();
    if (block->landed->error()) return false;
  }
  const at::NoGradGuard no_grad;
  for (size_t b = 0; b < gradients_.size(); ++b) {
    if (!gradients_[b]) continue;
    const memory::BlockLayout& layout = model_->blocks[b].gradient_layout;
    for (size_t i = 0; i < layout.tensors.size(); ++i) {
      const at::Tensor gradient = memory::gradient(*gradients_[b], layout, i);
      if (!gradient.defined()) continue;
      at::Tensor& parameter = optimizer_parameters_[b][i];
      at::Tensor& present = parameter.mutable_grad();
      if (present.defined()) {
        present.add_(gradient);
      } else {
        present = gradient.to(parameter.scalar_type());
      }
    }
    gradients_[b].reset();
  }
  return true;
}

}  // namespace roundpipe::runtime
