#pragma once

#include <string>
#include <utility>
#include <vector>

#include <roundpipe/api/model.h>

namespace roundpipe {

// A whole, some of whose modules are models in the pipeline: an Optimizer that is made for it steps all of it, and a
// checkpoint holds all of it, as those of AutoRoundPipe in Python do. The program itself calls the models, one by one,
// and computes on the host what is between them:
//
//   ModelGroup whole{{{"encoder", &encoder}, {"decoder", &decoder}}, {{"bridge.weight", bridge->weight}}};
//   Optimizer optimizer(whole, torch::optim::AdamWOptions(1e-3));
//   loss(decoder.forward(bridge(encoder.forward(batch)))).backward();
//   optimizer.step();
//
// Ownership: refers to the models.
struct ModelGroup {
  // By the name of the module in the whole, of which those of its parameters begin: "encoder.0.weight".
  std::vector<std::pair<std::string, Model*>> models;
  // What the whole has beside them, under its names. Parameters are leaves on the CPU. After a step they show the
  // weights that the next call reads.
  NamedParameters parameters = {};
  NamedParameters buffers = {};

  operator SteppedWeights() const;  // for Optimizer
};

}  // namespace roundpipe
