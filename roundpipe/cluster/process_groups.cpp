#include <roundpipe/cluster/process_groups.h>

#include <stdexcept>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <roundpipe/core/error.h>

namespace roundpipe::cluster {

c10::intrusive_ptr<c10d::ProcessGroup> process_group(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const std::exception& error) {
    throw std::invalid_argument(
        concat("[cluster] no process group is registered as '", name,
               "', expected one of torch.distributed.new_group that has not been destroyed: ", error.what()));
  }
}

}  // namespace roundpipe::cluster
