#include <roundpipe/simulate/update_with_disk.h>

#include <algorithm>
#include <limits>

namespace roundpipe::simulate {

double update_rate_with_disk(double update_gb_per_s, double disk_gb_per_s, std::int64_t weight_bytes,
                             std::int64_t disk_bytes) {
  if (disk_bytes <= 0 || disk_gb_per_s <= 0) return update_gb_per_s;
  const double by_disk = disk_gb_per_s * static_cast<double>(weight_bytes) / static_cast<double>(disk_bytes);
  return update_gb_per_s > 0 ? std::min(update_gb_per_s, by_disk) : by_disk;
}

double days_of_disk(double endurance_bytes, std::int64_t disk_bytes, double step_ms) {
  constexpr double kMsOfDay = 24.0 * 3600 * 1000;
  if (disk_bytes <= 0) return std::numeric_limits<double>::infinity();
  return endurance_bytes / static_cast<double>(disk_bytes) * step_ms / kMsOfDay;
}

}  // namespace roundpipe::simulate
