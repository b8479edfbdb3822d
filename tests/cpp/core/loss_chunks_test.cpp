#include <roundpipe/core/loss_chunks.h>

#include <doctest/doctest.h>

using namespace roundpipe;

TEST_CASE("loss chunks: a training goes on with the size of its checkpoint") {
  constexpr std::int64_t kMiB = 1 << 20;
  const auto bytes = [](bool is_said, std::optional<std::int64_t> saved, std::optional<std::int64_t> own) {
    const std::optional<KeptChunks> kept = kept_chunks(is_said, saved, own, "m");
    if (kept) CHECK(kept->notice.find("of m have " + std::to_string(kept->logit_bytes / kMiB)) != std::string::npos);
    return kept ? kept->logit_bytes : 0;
  };
  CHECK(bytes(true, kMiB, 64 * kMiB) == kMiB);
  CHECK(bytes(true, 64 * kMiB, 64 * kMiB) == 0);
  CHECK(bytes(true, std::nullopt, 64 * kMiB) == 0);
  CHECK(bytes(true, kMiB, std::nullopt) == 0);
  // What says nothing is from before cards had larger chunks than the host.
  CHECK(bytes(false, std::nullopt, chunk_logit_bytes(false)) == chunk_logit_bytes(true));
  CHECK(bytes(false, std::nullopt, chunk_logit_bytes(true)) == 0);
}
