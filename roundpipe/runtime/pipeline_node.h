#pragma once

#include <memory>
#include <vector>

#include <roundpipe/runtime/call/call.h>
#include <roundpipe/schedule/plan.h>

namespace roundpipe::runtime {

// What autograd tells when it reaches the outputs of a forward: the pipeline.
class BackwardRunner {
 public:
  virtual ~BackwardRunner() = default;
  // Submits the backward of `call` for gradients of the outputs, per microbatch; returns those of the inputs.
  virtual std::vector<std::vector<at::Tensor>> backward(const CallPtr& call, const schedule::Plan& plan,
                                                        std::vector<std::vector<at::Tensor>> gradients,
                                                        bool keep_graph) = 0;
  // Waits until the backward of `call` is over, and throws what it has raised.
  virtual void finish_backward(const CallPtr& call) = 0;
};

// Makes the outputs of a forward the results of one autograd node over all microbatches, with the inputs as its
// sources. The node keeps `runner`, and the call's activations until its backward is over.
void attach_graph(std::shared_ptr<BackwardRunner> runner, const CallPtr& call, const schedule::Plan& plan,
                  const std::vector<Values>& inputs, std::vector<Values>& outputs);

}  // namespace roundpipe::runtime
