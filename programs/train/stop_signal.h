#pragma once

namespace roundpipe::train {

// From its making on, the first SIGINT or SIGTERM is noted instead of ending the process; the second ends it. One
// object a process.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  // The signal that came; 0: none.
  int signal() const;
};

}  // namespace roundpipe::train
