#include <roundpipe/storage/disk_meter.h>

#include <filesystem>

#include <doctest/doctest.h>

#include "faulty_files.h"

using namespace roundpipe;

TEST_CASE("disk meter: moves what it is told to, and leaves nothing") {
  const support::TemporaryFolder folder;
  files::test::FaultyFiles files("disk");
  const storage::DiskSpeed speed = storage::measure_disk(folder.path(), 24 << 20, files);
  CHECK(speed.write_gb_per_s > 0);
  CHECK(speed.read_gb_per_s > 0);
  CHECK(speed.both_gb_per_s > 0);
  CHECK(std::filesystem::is_empty(folder.path()));
  files.fault = [](files::Call call, const std::string&, int) { return call == files::Call::kWrite ? EIO : 0; };
  CHECK_THROWS_AS(storage::measure_disk(folder.path(), 24 << 20, files), Error);
}
