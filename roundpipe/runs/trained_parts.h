#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/optim/algorithm.h>
#include <roundpipe/runtime/model_optimizer.h>
#include <roundpipe/saving/state_value.h>

namespace roundpipe {

// What a training consists of, for its checkpoints, as the front end of a language hands it in.

// A model in the pipeline.
struct TrainedModel {
  std::string path = {};  // the name of its module in the whole model; empty: it is the whole
  std::shared_ptr<runtime::Pipeline> pipeline;
  std::string name;                               // in messages
  std::optional<int> microbatches = {};           // of each call; unset: measurements are to choose
  std::optional<int64_t> chunk_logit_bytes = {};  // unset: its loss does not choose its chunks
  std::string arithmetic = {};                    // empty: it has no two forms
};

// An optimizer as torch's optimizers show themselves.
struct TrainedOptimizer {
  struct Group {
    StateValue options;  // for a save
    std::vector<at::Tensor> parameters;
  };
  std::string class_name;
  std::string moments;  // the name of their format
  std::vector<Group> groups;
};

// A fused optimizer of models, with the options of its groups.
struct FusedOptimizer {
  std::shared_ptr<runtime::ModelOptimizer> core;
  optim::Algorithm algorithm;
  optim::MomentFormat moments;
  std::vector<optim::Hyperparameters> options;
};

// The names of formats of moments in checkpoints.
inline const char* moments_name(optim::MomentFormat moments) {
  return moments == optim::MomentFormat::kFloat32 ? "float32" : "8bit";
}

}  // namespace roundpipe
