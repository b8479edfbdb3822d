#include <roundpipe/device/virtual/streaming_copy.h>

#include <cstring>
#include <vector>

#include <doctest/doctest.h>

using roundpipe::device::kStreamed_bytes;
using roundpipe::device::streaming_copy;

TEST_CASE("streaming copy: every byte and none beside them, from and to any address") {
  constexpr int64_t kMost = kStreamed_bytes + 200;
  constexpr uint8_t kUntouched = 0xEE;
  std::vector<uint8_t> source(kMost + 64);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint8_t>(i + (i >> 8) + (i >> 16));
  for (const int64_t size : {int64_t{0}, int64_t{1}, int64_t{4097}, kStreamed_bytes - 1, kStreamed_bytes, kMost}) {
    for (const auto& [from, to] : {std::pair{0, 0}, {1, 0}, {0, 1}, {7, 63}}) {
      std::vector<uint8_t> target(kMost + 128, kUntouched);
      uint8_t* const begin = target.data() + 32 + to;
      streaming_copy(begin, source.data() + from, size);
      CHECK(std::memcmp(begin, source.data() + from, static_cast<size_t>(size)) == 0);
      CHECK(begin[-1] == kUntouched);
      CHECK(begin[size] == kUntouched);
    }
  }
}
