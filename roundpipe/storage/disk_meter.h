#pragma once

#include <cstdint>
#include <string>

#include <roundpipe/files/file_system.h>

namespace roundpipe::storage {

// What a DiskTier reaches, in GB/s.
struct DiskSpeed {
  double write_gb_per_s = 0;  // nothing is read meanwhile
  double read_gb_per_s = 0;   // nothing is written meanwhile
  double both_gb_per_s = 0;   // that are read, and as many that are written beside them: a step
};

// Measures the disk of `folder` with so many bytes, each written twice and read twice. Blocks. Throws Error if the disk
// does not take them.
DiskSpeed measure_disk(const std::string& folder, int64_t bytes,
                       files::FileSystem& files = files::FileSystem::of_disk_tier());

}  // namespace roundpipe::storage
