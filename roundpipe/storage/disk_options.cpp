#include <roundpipe/storage/disk_options.h>

#include <algorithm>
#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe {

const std::vector<std::string>& disk_holds_names() {
  static const std::vector<std::string> names{"moments", "masters"};
  return names;
}

DiskHolds parse_disk_holds(const std::string& name) {
  const std::vector<std::string>& names = disk_holds_names();
  const auto found = std::ranges::find(names, name);
  if (found == names.end())
    throw std::invalid_argument(concat("[disk] disk_holds is '", name, "', expected 'moments' or 'masters'"));
  return static_cast<DiskHolds>(found - names.begin());
}

void check(const DiskOptions& disk) {
  if (disk.is_on()) return;
  const char* const given = disk.memory_bytes > 0               ? "disk_memory is given"
                            : disk.holds != DiskHolds::kMoments ? "disk_holds is 'masters'"
                                                                : nullptr;
  if (given != nullptr)
    throw std::invalid_argument(concat("[disk] ", given, " without disk; name a folder on a disk as well"));
}

}  // namespace roundpipe
