#include <roundpipe/core/fingerprint.h>

#include <numeric>
#include <set>
#include <vector>

#include <doctest/doctest.h>

using roundpipe::fingerprint;
using roundpipe::join_fingerprints;

namespace {

std::vector<unsigned char> bytes_of(std::size_t count) {
  std::vector<unsigned char> bytes(count);
  std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(7));
  return bytes;
}

}  // namespace

TEST_CASE("fingerprint: any single bit that changes is found, wherever it is") {
  for (const std::size_t count : {1, 8, 63, 64, 65, 200}) {
    std::vector<unsigned char> bytes = bytes_of(count);
    std::set<uint64_t> seen{fingerprint(bytes.data(), count)};
    for (std::size_t i = 0; i < count; ++i) {
      for (int bit = 0; bit < 8; ++bit) {
        bytes[i] ^= static_cast<unsigned char>(1 << bit);
        CHECK(seen.insert(fingerprint(bytes.data(), count)).second);
        bytes[i] ^= static_cast<unsigned char>(1 << bit);
      }
    }
    CHECK(seen.contains(fingerprint(bytes.data(), count)));
  }
}

TEST_CASE("fingerprint: words that change places are found, and so is another length of zeros") {
  std::vector<uint64_t> words(32);
  std::iota(words.begin(), words.end(), uint64_t{1} << 40);
  const uint64_t before = fingerprint(words.data(), words.size() * 8);
  for (std::size_t i = 0; i < words.size(); ++i) {
    for (std::size_t j = i + 1; j < words.size(); ++j) {
      std::swap(words[i], words[j]);
      CHECK(fingerprint(words.data(), words.size() * 8) != before);
      std::swap(words[i], words[j]);
    }
  }
  const std::vector<unsigned char> zeros(256);
  std::set<uint64_t> seen;
  for (std::size_t count = 0; count <= zeros.size(); ++count)
    CHECK(seen.insert(fingerprint(zeros.data(), count)).second);
}

TEST_CASE("fingerprint: a sequence differs if a part does, or their order") {
  CHECK(join_fingerprints(join_fingerprints(0, 1), 2) != join_fingerprints(join_fingerprints(0, 2), 1));
  CHECK(join_fingerprints(0, 1) != join_fingerprints(0, 2));
  CHECK(join_fingerprints(1, 0) != join_fingerprints(2, 0));
}
