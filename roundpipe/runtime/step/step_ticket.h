#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/runtime/model/model_state.h>

namespace roundpipe::runtime {

// The gradients that one step of a general optimizer consumes. Made on the caller's thread, used once on the
// optimizer's thread.
class StepTicket {
 public:
  StepTicket(std::shared_ptr<ModelState> model, std::vector<memory::GradientBlockPtr> gradients,
             std::vector<std::vector<at::Tensor>> optimizer_parameters);

  // Waits until every gradient has landed, then adds them to the optimizer parameters' .grad. Returns false, with
  // nothing changed, if a call that they come from has failed.
  bool hand_over();

 private:
  std::shared_ptr<ModelState> model_;
  std::vector<memory::GradientBlockPtr> gradients_;
  std::vector<std::vector<at::Tensor>> optimizer_parameters_;
};

}  // namespace roundpipe::runtime
