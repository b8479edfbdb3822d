#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/memory/segment_source.h>

namespace roundpipe::memory {

struct HostArenaStats {
  int64_t asked_bytes = 0;     // of the pieces that somebody holds
  int64_t reserved_bytes = 0;  // taken from the system for them
  int64_t locked_bytes = 0;    // of these, page-locked
  int64_t pieces = 0;
};

// Host memory of models and of steps: large pieces by themselves, small ones packed into segments that they share, so
// that little more is taken from the system, and locked, than was asked for.
//
// Thread safety: any thread. While one thread gets a new segment from the system, which may take long, others still
// take pieces of what is there and give pieces back.
class HostArena {
 public:
  // Pieces start at multiples of this.
  static constexpr int64_t kAlignment_bytes = 64;

  // What becomes of a segment when the last tensor in it is gone.
  enum class Empty {
    kGivenBack,  // to the system: for what models hold
    kKept,       // for the next pieces, large ones too: for what every step makes and drops. Before more is taken,
                 // what nobody uses goes back, so that about half as much again is reserved as was ever in use.
  };

  explicit HostArena(std::unique_ptr<SegmentSource> source, Empty empty = Empty::kGivenBack);
  ~HostArena() { trim(); }
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // Uninitialised uint8 [size_bytes]. REQUIRES: the arena outlives the tensor. Throws OutOfHostMemory.
  at::Tensor allocate(int64_t size_bytes);

  HostArenaStats stats() const;

  // Gives the segments that nobody uses back to the system.
  void trim() noexcept;

  // The process's arenas; they live until it ends, and survive a fork. page_locked() hands out pageable memory where
  // locking fails, with one warning a process.
  static HostArena& pageable();
  static HostArena& page_locked();
  // For what steps make and drop: inputs, activations at boundaries and their gradients, losses, labels, buffers.
  static HostArena& values(bool page_locked);
  // Trims both arenas of values. Called when a model is gone, and when the system has no more memory.
  static void trim_values() noexcept;

 private:
  struct Held {
    Segment segment;
    int64_t used_bytes = 0;  // by pieces, each rounded up to kAlignment_bytes
  };

  // The smallest free range that is large enough; null when there is none. REQUIRES: mutex_ is held, as for all below.
  std::byte* take_free(int64_t size_bytes);
  std::byte* take_new(Segment segment, int64_t size_bytes);
  void count_taken(int64_t size_bytes);
  void add_free(std::byte* data, int64_t size_bytes);
  void remove_free(std::map<std::byte*, int64_t>::iterator range);
  std::map<std::byte*, Held>::iterator holder_of(std::byte* data);

  // A new segment, after giving back what a kept arena has too much. REQUIRES: growing_ is held, and mutex_ is not.
  Segment acquire(int64_t size_bytes);

  // A piece's last tensor is gone.
  void give_back(std::byte* data, int64_t asked_bytes) noexcept;

  // A segment that nobody uses out of the arena.
  Segment take_out(std::map<std::byte*, Held>::iterator held);
  // Takes segments that nobody uses out of the arena until at most `limit_bytes` are reserved.
  std::vector<Segment> take_unused(int64_t limit_bytes);

  static HostArena* made_fork_safe(std::unique_ptr<SegmentSource> source, Empty empty = Empty::kGivenBack);

  const std::unique_ptr<SegmentSource> source_;
  const Empty empty_;
  std::mutex growing_;        // held while a segment is made; taken before mutex_
  mutable std::mutex mutex_;  // held for bookkeeping only
  // Protected by mutex_.
  std::map<std::byte*, Held> segments_;                    // by first byte
  std::map<std::byte*, int64_t> free_by_place_;            // ranges of shared segments, neighbours merged
  std::set<std::pair<int64_t, std::byte*>> free_by_size_;  // the same ranges
  HostArenaStats stats_;
  int64_t used_bytes_ = 0;  // by pieces, each rounded up to kAlignment_bytes
  int64_t most_used_bytes_ = 0;
};

// As at::empty_strided, in memory of the arena.
at::Tensor empty_strided(HostArena& arena, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// All arenas of the process together.
HostArenaStats host_arena_stats();

}  // namespace roundpipe::memory
