#include <roundpipe/storage/disk_meter.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include <roundpipe/core/clock.h>
#include <roundpipe/storage/disk_tier.h>
#include <roundpipe/storage/division.h>

namespace roundpipe::storage {

DiskSpeed measure_disk(const std::string& folder, int64_t bytes, files::FileSystem& files) {
  constexpr int64_t kBlock_bytes = 64 << 20;
  using Use = DiskTier::Use;
  const int64_t block_bytes = std::min(kBlock_bytes, bytes / (2 * kWindowBlocks));
  std::vector<size_t> order(static_cast<size_t>(bytes / block_bytes));
  std::iota(order.begin(), order.end(), size_t{0});
  DiskTier tier(folder, std::vector<int64_t>(order.size(), block_bytes), kWindowBlocks * block_bytes, files);
  const auto gb_per_s = [&](Use use) {
    const double began_ms = now_ms();
    tier.expect(order);
    for (const size_t block : order) {
      const at::Tensor memory = tier.acquire(block, block_bytes, use);
      // A disk may make short work of zeros.
      auto* const values = static_cast<uint64_t*>(memory.mutable_data_ptr());
      for (int64_t i = 0; use == Use::kChange && i < block_bytes / 8; i += 64)
        values[i] = (static_cast<uint64_t>(i) + block + 1) * 0x9E3779B97F4A7C15U;
      tier.release(block, use);
      tier.over(block);
    }
    tier.settle();
    tier.raise();
    return static_cast<double>(block_bytes) * static_cast<double>(order.size()) / ((now_ms() - began_ms) * 1e6);
  };
  DiskSpeed speed;
  speed.write_gb_per_s = gb_per_s(Use::kChange);
  speed.read_gb_per_s = gb_per_s(Use::kRead);
  speed.both_gb_per_s = gb_per_s(Use::kChange);
  return speed;
}

}  // namespace roundpipe::storage
