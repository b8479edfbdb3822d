#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>

#include <roundpipe/core/error.h>
#include <roundpipe/device/page_locker.h>

namespace roundpipe::memory {

// The system has no memory left. Python sees a MemoryError.
class ROUNDPIPE_API OutOfHostMemory : public std::bad_alloc {
 public:
  explicit OutOfHostMemory(int64_t size_bytes);
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// Host memory that is taken from the system and released as a whole. Starts at a page.
struct Segment {
  std::byte* data = nullptr;
  int64_t size_bytes = 0;
  bool locked = false;  // page-locked, so that devices copy directly from and to it
  bool shared = false;  // several pieces may share it
  c10::DataPtr owner;   // set if another allocator owns the memory
};

// Gives a HostArena its segments.
// Thread safety: any thread.
class SegmentSource {
 public:
  virtual ~SegmentSource() = default;

  // Returns a new segment with room for a piece of `piece_bytes`, for an arena that holds `reserved_bytes` already. If
  // pages should be locked and cannot be, the segment is pageable, and the process is warned once.
  // Throws OutOfHostMemory.
  virtual Segment acquire(int64_t piece_bytes, int64_t reserved_bytes) = 0;

  // Releases `segment` to the system.
  virtual void release(Segment segment) noexcept = 0;
};

// Makes mappings: one for each large piece, and shared ones for small pieces. Pages are interleaved over the machine's
// memory nodes and locked by `locker` (null: pageable). REQUIRES: `locker` outlives the source.
std::unique_ptr<SegmentSource> make_mapped_source(device::PageLocker* locker);

// Takes memory from torch's page-locking allocator, for accelerators whose runtime has no page locker. The allocator's
// sizes are powers of two, so pieces share segments: the more pieces, the less is wasted. REQUIRES: `allocator` lives
// until the process ends.
std::unique_ptr<SegmentSource> make_pinned_source(at::HostAllocator* allocator);

// Makes pageable mappings where page-locked ones were requested and nothing can lock them. Warns once, with the first
// mapping.
std::unique_ptr<SegmentSource> make_unlockable_source();

}  // namespace roundpipe::memory
