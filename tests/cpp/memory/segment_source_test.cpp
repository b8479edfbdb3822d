#include <roundpipe/memory/segment_source.h>

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include <doctest/doctest.h>

using namespace roundpipe::memory;

namespace {

int64_t huge_page_bytes() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
  int64_t bytes = 0;
  return file >> bytes ? bytes : 0;
}

// Whether this process has requested huge pages at `data`; a mapping's flags follow its addresses in the file.
bool asks_for_huge_pages(const std::byte* data) {
  std::ifstream maps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t first = 0, last = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &first, &last) == 2 && line.find(':') > line.find('-')) {
      const auto place = reinterpret_cast<uintptr_t>(data);
      here = place >= first && place < last;
    } else if (here && line.starts_with("VmFlags:")) {
      return line.find(" hg") != std::string::npos;
    }
  }
  return false;
}

int64_t mapped_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0;
  file >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

}  // namespace

TEST_CASE("mapped source: what holds several huge pages begins at one and asks for them; it goes back as a whole") {
  const auto source = make_mapped_source(nullptr);
  const int64_t huge_bytes = huge_page_bytes();
  if (huge_bytes == 0) return;  // a system without them
  const int64_t before_bytes = mapped_bytes();
  for (const int64_t size_bytes : {2 * huge_bytes, 3 * huge_bytes + sysconf(_SC_PAGESIZE)}) {
    Segment segment = source->acquire(size_bytes, 0);
    CHECK(segment.size_bytes == size_bytes);
    CHECK(reinterpret_cast<uintptr_t>(segment.data) % static_cast<uintptr_t>(huge_bytes) == 0);
    CHECK(asks_for_huge_pages(segment.data));
    std::memset(segment.data, 1, static_cast<size_t>(size_bytes));
    source->release(std::move(segment));
    CHECK(mapped_bytes() - before_bytes < huge_bytes);
  }
  Segment small = source->acquire(huge_bytes, 0);
  CHECK_FALSE(asks_for_huge_pages(small.data));
  source->release(std::move(small));
}
