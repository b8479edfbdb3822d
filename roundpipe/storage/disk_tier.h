#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/error.h>
#include <roundpipe/files/file_system.h>

namespace roundpipe::storage {

// The disk does not give back what was written to it.
class ROUNDPIPE_API Unreadable : public Error {
 public:
  using Error::Error;
};

// Blocks of bytes on a disk, of which a few at a time are in memory: the next ones are read ahead, in the order in
// which they are expected, and changed ones are written behind, by threads of its own, past the system's cache where
// the disk's format allows. Its memory is a window of a fixed size, which only what the disk does not take exceeds.
//
// The bytes are in one file without a name: it ends with the process, whatever ends that, and two runs in one folder do
// not meet.
//
// A block whose write fails stays in memory, and raise() tells; nothing is lost. A block that cannot be read stays as
// it is on the disk: acquire() throws Unreadable, and may be called again.
// Thread safety: any thread.
class DiskTier {
 public:
  enum class Use { kRead, kChange };

  // `block_bytes`: what blocks are going to take, for which room is set aside on the disk now and in the window as they
  // come; they may grow beyond it. Makes the folder. Throws Error if the disk has no room for them.
  DiskTier(const std::string& folder, const std::vector<int64_t>& block_bytes, int64_t window_bytes,
           files::FileSystem& files = files::FileSystem::of_disk_tier());
  // Waits for transfers under way; what is not written yet is dropped. REQUIRES: nothing is acquired.
  ~DiskTier();
  DiskTier(const DiskTier&) = delete;
  DiskTier& operator=(const DiskTier&) = delete;

  // The block's bytes, uint8: those of the last release(), then any, `bytes` in all or as many as there were, if those
  // are more. Waits until they are read and until nobody who has the block changes it, or, to change it, until nobody
  // has it. REQUIRES: the thread has no block.
  at::Tensor acquire(size_t block, int64_t bytes, Use use);
  // Ends one use; after a change, the block is written.
  void release(size_t block, Use use) noexcept;

  // The blocks of a step, in the order in which they will be acquired, after those that are expected already. After the
  // last of them, the same ones are expected again.
  void expect(std::vector<size_t> order);
  // The first use that is expected of the block is over, or will not come.
  void over(size_t block) noexcept;

  // Waits until what was released is written, or a write of it has failed.
  void settle();
  // Throws the error of a write that has failed since the last call. Called again, it first waits for another try, and
  // throws if that fails as well.
  void raise();

  struct Stats {
    int64_t read_bytes = 0;
    int64_t written_bytes = 0;
    int64_t most_memory_bytes = 0;
    double waited_ms = 0;  // in acquire()
  };
  Stats stats() const;

 private:
  class Transfers;
  // Threads use it; a process that fork() left behind never frees it.
  Transfers* const transfers_;
};

}  // namespace roundpipe::storage
