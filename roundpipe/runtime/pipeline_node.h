#pragma once

#include <memory>
#include <vector>

#include <roundpipe/runtime/call/call.h>
#include <roundpipe/schedule/plan.h>

namespace roundpipe::runtime {

// The interface, implemented by the pipeline, that autograd calls when it reaches the outputs of a forward.
class BackwardRunner {
 public:
  virtual ~BackwardRunner() = default;
  // Submits the backward of `call` for the gradients of the outputs, per microbatch; returns those of the inputs.
  virtual std::vector<std::vector<at::Tensor>> backward(const CallPtr& call, const schedule::Plan& plan,
                                                        std::vector<std::vector<at::Tensor>> gradients,
                                                        bool keep_graph) = 0;
  // Waits until the backward of `call` is over, and throws its error.
  virtual void finish_backward(const CallPtr& call) = 0;
};

// Makes the outputs of a forward the results of one autograd node over all microbatches, whose sources are the inputs.
// The node keeps `runner`, and keeps the call's activations until its backward is over.
void attach_graph(std::shared_ptr<BackwardRunner> runner, const CallPtr& call, const schedule::Plan& plan,
                  const std::vector<Values>& inputs, std::vector<Values>& outputs);

}  // namespace roundpipe::runtime
