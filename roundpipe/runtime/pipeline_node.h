#pragma once

#include <vector>

#include <roundpipe/runtime/pipeline.h>

namespace roundpipe::runtime {

// Makes the outputs of a forward the results of one autograd node over all microbatches, with the inputs as its
// sources: when autograd reaches it, it runs the pipeline backward. The node keeps the call's activations until its
// backward is over. `pipeline` must outlive the graph (the Python package keeps it alive through the outputs' node).
void attach_graph(Pipeline& pipeline, const CallPtr& call, const schedule::Plan& plan,
                  const std::vector<Values>& inputs, std::vector<Values>& outputs);

}  // namespace roundpipe::runtime
