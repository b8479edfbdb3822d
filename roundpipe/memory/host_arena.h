#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/mutex.h>
#include <roundpipe/memory/segment_source.h>

namespace roundpipe::memory {

struct HostArenaStats {
  int64_t asked_bytes = 0;     // requested for the live pieces
  int64_t reserved_bytes = 0;  // taken from the system
  int64_t locked_bytes = 0;    // page-locked part of reserved_bytes
  int64_t pieces = 0;
};

// Host memory for models and steps. Large pieces get segments of their own; small ones share segments, so that little
// more memory than requested is taken from the system and page-locked.
//
// Thread safety: any thread. While one thread gets a new segment from the system, which may take long, others can still
// take pieces from existing segments and give pieces back.
class HostArena {
 public:
  // Pieces start at multiples of this.
  static constexpr int64_t kAlignment_bytes = 64;

  // The fate of a segment when the last tensor in it is destroyed.
  enum class Empty {
    kGivenBack,  // released to the system; for memory that models hold
    kKept,       // kept for the next pieces, large ones too; for memory that every step takes and drops. Before taking
                 // more, the arena releases unused segments above about 1.5 times its peak use since the last trim().
  };

  explicit HostArena(std::unique_ptr<SegmentSource> source, Empty empty = Empty::kGivenBack);
  ~HostArena() { trim(); }
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // Returns uninitialized uint8 [size_bytes]. REQUIRES: the arena outlives the tensor. Throws OutOfHostMemory.
  at::Tensor allocate(int64_t size_bytes);

  HostArenaStats stats() const;

  // Releases unused segments to the system.
  void trim() noexcept;

  // The process's arenas. They live until the process ends and stay usable after a fork. If locking fails,
  // page_locked() gives pageable memory, with one warning per process.
  static HostArena& pageable();
  static HostArena& page_locked();
  // Arenas for values that steps make and drop: inputs, activations at boundaries and their gradients, losses, labels,
  // buffers.
  static HostArena& values(bool page_locked);
  // Trims both arenas of values. Called when a model or a pool of devices is destroyed, and when the system has no
  // memory left.
  static void trim_values() noexcept;

 private:
  struct Held {
    Segment segment;
    int64_t used_bytes = 0;  // by pieces, each rounded up to kAlignment_bytes
  };

  // Takes a piece from the smallest free range that is large enough; null if there is none.
  std::byte* take_free(int64_t size_bytes) ROUNDPIPE_REQUIRES(mutex_);
  std::byte* take_new(Segment segment, int64_t size_bytes) ROUNDPIPE_REQUIRES(mutex_);
  void count_taken(int64_t size_bytes) ROUNDPIPE_REQUIRES(mutex_);
  void add_free(std::byte* data, int64_t size_bytes) ROUNDPIPE_REQUIRES(mutex_);
  void remove_free(std::map<std::byte*, int64_t>::iterator range) ROUNDPIPE_REQUIRES(mutex_);
  std::map<std::byte*, Held>::iterator holder_of(std::byte* data) ROUNDPIPE_REQUIRES(mutex_);

  // Returns a new segment. A kept arena first releases excess unused segments. REQUIRES: mutex_ is not held.
  Segment acquire(int64_t size_bytes) ROUNDPIPE_REQUIRES(growing_);

  // Called when a piece's last tensor is destroyed. REQUIRES: mutex_ is not held.
  void give_back(std::byte* data, int64_t asked_bytes) noexcept;

  // Removes an unused segment from the arena and returns it.
  Segment take_out(std::map<std::byte*, Held>::iterator held) ROUNDPIPE_REQUIRES(mutex_);
  // Removes unused segments from the arena until at most `limit_bytes` are reserved, and returns them.
  std::vector<Segment> take_unused(int64_t limit_bytes) ROUNDPIPE_REQUIRES(mutex_);

  static HostArena* made_fork_safe(std::unique_ptr<SegmentSource> source, Empty empty = Empty::kGivenBack);

  const std::unique_ptr<SegmentSource> source_;
  const Empty empty_;
  Mutex growing_;        // held while a segment is made; taken before mutex_
  mutable Mutex mutex_;  // held for bookkeeping only
  std::map<std::byte*, Held> segments_ ROUNDPIPE_GUARDED_BY(mutex_);  // by first byte
  std::map<std::byte*, int64_t> free_by_place_
      ROUNDPIPE_GUARDED_BY(mutex_);  // ranges of shared segments, neighbours merged
  std::set<std::pair<int64_t, std::byte*>> free_by_size_ ROUNDPIPE_GUARDED_BY(mutex_);  // the same ranges
  HostArenaStats stats_ ROUNDPIPE_GUARDED_BY(mutex_);
  int64_t used_bytes_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;  // by pieces, each rounded up to kAlignment_bytes
  int64_t most_used_bytes_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
};

// Like at::empty_strided, in memory of the arena.
at::Tensor empty_strided(HostArena& arena, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// The sum over all arenas of the process.
HostArenaStats host_arena_stats();

}  // namespace roundpipe::memory
