#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <roundpipe/runtime/call/job_results.h>

namespace roundpipe::runtime {

// One run of a job that is checked: the device, and a checksum of each result.
struct CheckedRun {
  size_t device = 0;  // its place among CheckedDevice
  std::map<JobResult, uint32_t> results;
};

// A device that has run the job, and whether bytes that were sent to it and back came back changed.
struct CheckedDevice {
  std::string name;
  bool changes_copies = false;
};

// What the runs of one job say about the devices that ran it.
struct Verdict {
  std::vector<size_t> wrong;  // devices whose results are wrong; empty if the runs do not tell
  std::string reason;         // the evidence, as the rest of a sentence
};

// Whether all runs had the same results.
bool agree(const std::vector<CheckedRun>& runs);

// Judges runs that do not agree. A device is wrong if it changes copies; if its own runs differ, while those of each
// other device that ran the job twice agree; or if more devices have the same other results. REQUIRES: two runs.
Verdict judge(const std::vector<CheckedDevice>& devices, const std::vector<CheckedRun>& runs);

}  // namespace roundpipe::runtime
