#pragma once

#include <cstdint>

namespace roundpipe::simulate {

// The rate of updates, in GB of weights a second, if a disk holds `disk_bytes` of the state of `weight_bytes`, which
// are read and written in each step. `update_gb_per_s`: without the disk; 0: at once. `disk_gb_per_s`: that are read,
// and as many that are written beside them; 0: at once. Updates, reads and writes run side by side, each of another
// block, so the slower one counts.
double update_rate_with_disk(double update_gb_per_s, double disk_gb_per_s, std::int64_t weight_bytes,
                             std::int64_t disk_bytes);

// The days of training after which a disk has been written `endurance_bytes`; infinite if nothing is written.
double days_of_disk(double endurance_bytes, std::int64_t disk_bytes, double step_ms);

}  // namespace roundpipe::simulate
