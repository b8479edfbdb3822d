#pragma once

#include <memory>
#include <vector>

#include <roundpipe/cluster/nodes.h>

#include "local_group.h"

namespace roundpipe::support {

// Nodes that are threads of one process.
inline std::vector<std::shared_ptr<cluster::Nodes>> made_nodes(int count) {
  const auto gradients = std::make_shared<Meeting>(count), weights = std::make_shared<Meeting>(count),
             control = std::make_shared<Meeting>(count);
  constexpr std::chrono::seconds kTimeout(60);
  std::vector<std::shared_ptr<cluster::Nodes>> nodes;
  for (int rank = 0; rank < count; ++rank) {
    nodes.push_back(std::make_shared<cluster::Nodes>(
        c10::make_intrusive<LocalGroup>(gradients, rank), c10::make_intrusive<LocalGroup>(weights, rank),
        std::make_shared<cluster::Control>(c10::make_intrusive<LocalGroup>(control, rank), kTimeout), kTimeout));
  }
  return nodes;
}

}  // namespace roundpipe::support
