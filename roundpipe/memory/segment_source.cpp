#include <roundpipe/memory/segment_source.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <string_view>

#include <c10/util/Exception.h>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/memory/numa.h>

namespace roundpipe::memory {
namespace {

// A piece of at least this size gets its own mapping: rounding up to a page wastes at most 1.6 % of it.
constexpr int64_t kOwnMapping_bytes = 256 << 10;
// Shared segments grow with the arena, so that a nearly empty one wastes little.
constexpr int64_t kSmallestShared_bytes = 256 << 10;
constexpr int64_t kLargestShared_bytes = 16 << 20;
constexpr int64_t kSharedFraction = 32;

int64_t page_bytes() {
  static const auto size = static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  return size;
}

// The size of the system's transparent huge pages; 0 if it has none.
int64_t huge_page_bytes() {
  static const int64_t size = [] {
    std::ifstream file("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
    int64_t bytes = 0;
    return file >> bytes ? bytes : 0;
  }();
  return size;
}

// Maps `size_bytes` (a multiple of a page) of anonymous memory, or returns null. Large mappings start at a huge page
// and request huge pages: fewer to look up and, when pages are locked, far fewer to visit.
void* map_pages(int64_t size_bytes) {
  const int64_t huge_bytes = huge_page_bytes();
  const bool huge = huge_bytes > 0 && size_bytes >= 2 * huge_bytes;
  const int64_t mapped_bytes = huge ? size_bytes + huge_bytes : size_bytes;
  void* const mapped =
      mmap(nullptr, static_cast<size_t>(mapped_bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  if (!huge) return mapped;
  auto* const begin = static_cast<std::byte*>(mapped);
  const int64_t before_bytes =
      align_up(reinterpret_cast<int64_t>(begin), huge_bytes) - reinterpret_cast<int64_t>(begin);
  std::byte* const data = begin + before_bytes;
  if (before_bytes > 0) munmap(begin, static_cast<size_t>(before_bytes));
  if (before_bytes < huge_bytes) munmap(data + size_bytes, static_cast<size_t>(huge_bytes - before_bytes));
  // Fails on a system where huge pages are switched off, without harm.
  madvise(data, static_cast<size_t>(size_bytes), MADV_HUGEPAGE);
  return data;
}

void warn_pageable_once(int64_t size_bytes, std::string_view why) {
  static std::atomic<bool> warned{false};
  if (warned.exchange(true)) return;
  TORCH_WARN("[memory] could not page-lock ", format_bytes(size_bytes), " of host memory: ", why,
             "; expected room for the whole model. Pageable memory is used instead, so transfers are slower; raise the "
             "limit (ulimit -l unlimited, or the container's memlock), or do not ask for it (pin_model=\"off\" of a "
             "model, ModelOptions::pin in C++)");
}

class MappedSource final : public SegmentSource {
 public:
  explicit MappedSource(device::PageLocker* locker) : locker_(locker), nodes_(memory_nodes()), process_(getpid()) {}

  Segment acquire(int64_t piece_bytes, int64_t reserved_bytes) override {
    Segment segment;
    segment.shared = piece_bytes < kOwnMapping_bytes;
    segment.size_bytes = piece_bytes;
    if (segment.shared) {
      // A multiple of the piece, because layers tend to be equal: a full segment wastes nothing.
      const int64_t wanted = std::clamp(reserved_bytes / kSharedFraction, kSmallestShared_bytes, kLargestShared_bytes);
      segment.size_bytes = piece_bytes * ((wanted + piece_bytes - 1) / piece_bytes);
    }
    segment.size_bytes = align_up(segment.size_bytes, page_bytes());
    void* const data = map_pages(segment.size_bytes);
    if (data == nullptr) throw OutOfHostMemory(segment.size_bytes);
    segment.data = static_cast<std::byte*>(data);
    interleave(data, segment.size_bytes, nodes_);
    segment.locked = locker_ != nullptr && locker_->lock(data, segment.size_bytes);
    if (locker_ != nullptr && !segment.locked) warn_pageable_once(segment.size_bytes, "the system refused");
    return segment;
  }

  void release(Segment segment) noexcept override {
    // A forked child has the mapping, but neither its locks nor a usable runtime.
    if (segment.locked && getpid() == process_) locker_->unlock(segment.data, segment.size_bytes);
    munmap(segment.data, static_cast<size_t>(segment.size_bytes));
  }

 private:
  device::PageLocker* const locker_;
  const std::vector<int> nodes_;
  const pid_t process_;
};

class PinnedSource final : public SegmentSource {
 public:
  explicit PinnedSource(at::HostAllocator* allocator) : allocator_(allocator), pageable_(nullptr) {}

  Segment acquire(int64_t piece_bytes, int64_t reserved_bytes) override {
    const int64_t size_bytes = best_size(piece_bytes, reserved_bytes);
    try {
      Segment segment;
      segment.owner = allocator_->allocate(static_cast<size_t>(size_bytes));
      segment.data = static_cast<std::byte*>(segment.owner.get());
      segment.size_bytes = size_bytes;
      segment.locked = true;
      segment.shared = true;
      return segment;
    } catch (const c10::Error& error) {
      warn_pageable_once(size_bytes, error.what_without_backtrace());
      return pageable_.acquire(piece_bytes, reserved_bytes);
    }
  }

  void release(Segment segment) noexcept override {
    if (!segment.owner) {
      pageable_.release(std::move(segment));
      return;
    }
    try {
      segment.owner.clear();
      allocator_->empty_cache();  // otherwise it would keep the memory for later requests
    } catch (const c10::Error&) {
      // The runtime is gone, and the memory with it.
    }
  }

 private:
  // The smallest power of two that pieces of this size fill well, but no more than the arena's size so far (unless one
  // piece needs it): segments double until little is wasted.
  static int64_t best_size(int64_t piece_bytes, int64_t reserved_bytes) {
    constexpr double kLittle = 0.03;
    int64_t size = kSmallestShared_bytes;
    while (size < piece_bytes) size *= 2;
    int64_t best = size;
    const auto left_over = [piece_bytes](int64_t bytes) {
      return static_cast<double>(bytes % piece_bytes) / static_cast<double>(bytes);
    };
    for (; size <= reserved_bytes && left_over(best) > kLittle; size *= 2) {
      if (left_over(size) < left_over(best)) best = size;
    }
    return best;
  }

  at::HostAllocator* const allocator_;
  MappedSource pageable_;
};

class UnlockableSource final : public SegmentSource {
 public:
  UnlockableSource() : pageable_(nullptr) {}

  Segment acquire(int64_t piece_bytes, int64_t reserved_bytes) override {
    warn_pageable_once(piece_bytes, "torch has no accelerator here that could lock it");
    return pageable_.acquire(piece_bytes, reserved_bytes);
  }

  void release(Segment segment) noexcept override { pageable_.release(std::move(segment)); }

 private:
  MappedSource pageable_;
};

}  // namespace

OutOfHostMemory::OutOfHostMemory(int64_t size_bytes)
    : message_(concat("[memory] the system has no ", format_bytes(size_bytes),
                      " of host memory left; expected room for the model's weights and gradients; use a smaller model "
                      "or a machine with more memory, or raise the limit (ulimit -v, the container's)")) {}

std::unique_ptr<SegmentSource> make_mapped_source(device::PageLocker* locker) {
  return std::make_unique<MappedSource>(locker);
}

std::unique_ptr<SegmentSource> make_pinned_source(at::HostAllocator* allocator) {
  return std::make_unique<PinnedSource>(allocator);
}

std::unique_ptr<SegmentSource> make_unlockable_source() { return std::make_unique<UnlockableSource>(); }

}  // namespace roundpipe::memory
