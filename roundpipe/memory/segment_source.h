#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>

#include <roundpipe/device/page_locker.h>

namespace roundpipe::memory {

// The system has no more memory to give. Python sees a MemoryError.
class OutOfHostMemory : public std::bad_alloc {
 public:
  explicit OutOfHostMemory(int64_t size_bytes);
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// Host memory that the system gives and takes back as a whole. Begins at a page.
struct Segment {
  std::byte* data = nullptr;
  int64_t size_bytes = 0;
  bool locked = false;  // its pages stay in memory, and devices copy from and to them directly
  bool shared = false;  // what the piece it was made for leaves over is for other pieces
  c10::DataPtr owner;   // set where somebody else's allocator owns it
};

// Where a HostArena takes its segments from.
// Thread safety: any thread.
class SegmentSource {
 public:
  virtual ~SegmentSource() = default;

  // A new segment with room for a piece of `piece_bytes`, in an arena that has `reserved_bytes` already. Where pages
  // should be locked and cannot be, the segment is pageable, and the process has been warned once.
  // Throws OutOfHostMemory.
  virtual Segment acquire(int64_t piece_bytes, int64_t reserved_bytes) = 0;

  // Gives `segment` back to the system.
  virtual void release(Segment segment) noexcept = 0;
};

// Mappings of the process: one for each large piece, and ones that small pieces share. Pages are interleaved over the
// machine's memory nodes and locked by `locker`; null: pageable. REQUIRES: `locker` outlives the source.
std::unique_ptr<SegmentSource> make_mapped_source(device::PageLocker* locker);

// Memory of torch's page-locking allocator, whose sizes are powers of two: several pieces share a segment, so that less
// is left over the more there are. For accelerators whose runtime has no page locker. REQUIRES: `allocator` lives until
// the process ends.
std::unique_ptr<SegmentSource> make_pinned_source(at::HostAllocator* allocator);

// Mappings that nothing can lock, although that was asked for; warns once when the first one is made.
std::unique_ptr<SegmentSource> make_unlockable_source();

}  // namespace roundpipe::memory
