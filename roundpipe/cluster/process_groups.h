#pragma once

#include <string>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class ProcessGroup;
}

namespace roundpipe::cluster {

// The group that is registered under this name, as torch.distributed.new_group does. Throws std::invalid_argument if
// there is none.
c10::intrusive_ptr<c10d::ProcessGroup> process_group(const std::string& name);

}  // namespace roundpipe::cluster
