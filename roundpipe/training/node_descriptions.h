#pragma once

#include <optional>
#include <string>
#include <vector>

#include <roundpipe/cluster/differences.h>
#include <roundpipe/cluster/shared_values.h>
#include <roundpipe/optim/algorithm.h>

namespace roundpipe {

// What has to be alike on all nodes, in words.

struct ModelTraits {
  std::string version;                       // of roundpipe
  std::string torch_version;                 // of torch
  std::string kind;                          // the name of the model's class
  std::optional<int> layers = std::nullopt;  // how many it has; unset: none of its own
};
// Of a model, under every name of every parameter and buffer.
cluster::Told describe(const ModelTraits& model, const cluster::NamedTensors& parameters,
                       const cluster::NamedTensors& buffers);

// The options of a group under torch.optim's names, as a C++ program writes them.
cluster::Told describe(optim::Algorithm algorithm, const optim::Hyperparameters& options);

// The options of each group, as the language writes them.
cluster::Told describe_groups(const std::vector<cluster::Told>& groups);

struct OptimizerTraits {
  std::string kind;                                 // the name of its class
  std::vector<cluster::Told> options;               // of each group
  std::vector<std::vector<at::Tensor>> parameters;  // of each group
  cluster::Told format;                             // options that are of no group
};
// An optimizer's kind and groups; `named`: every name of every parameter.
cluster::Told describe(const OptimizerTraits& optimizer, const cluster::NamedTensors& named);

}  // namespace roundpipe
