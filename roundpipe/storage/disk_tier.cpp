#include <roundpipe/storage/disk_tier.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/clock.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/memory/host_arena.h>

namespace roundpipe::storage {

namespace {

using files::kDirect_bytes;

// One transfer's size, of which each thread has one under way.
constexpr int64_t kPart_bytes = 8 << 20;
constexpr int kReaders = 2, kWriters = 2;

int64_t pages(int64_t bytes) { return align_up(std::max<int64_t>(bytes, 1), kDirect_bytes); }

}  // namespace

class DiskTier::Transfers {
 public:
  Transfers(const std::string& folder, const std::vector<int64_t>& block_bytes, int64_t window_bytes,
            files::FileSystem& files)
      : window_bytes_(window_bytes),
        file_((files.make_folders(folder), files.create_nameless(folder))),
        blocks_(block_bytes.size()) {
    for (size_t i = 0; i < block_bytes.size(); ++i) {
      if (block_bytes[i] == 0) continue;
      blocks_[i].place = end_;
      blocks_[i].place_bytes = pages(block_bytes[i]);
      end_ += blocks_[i].place_bytes;
    }
    if (end_ > 0) file_.file.reserve(end_);
    engine_begins();
    for (int i = 0; i < kReaders; ++i) threads_.emplace_back([this] { work(Stage::kReading); });
    for (int i = 0; i < kWriters; ++i) threads_.emplace_back([this] { work(Stage::kWriting); });
  }

  ~Transfers() {
    {
      const MutexLock lock(mutex_);
      is_stopped_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  at::Tensor acquire(size_t index, int64_t bytes, Use use) {
    const double began_ms = now_ms();
    const MutexLock lock(mutex_);
    Block& block = blocks_.at(index);
    const Waiting waiting(block);
    bool asked = false;
    for (;;) {
      const bool is_free = use == Use::kRead ? !block.is_being_changed : block.users == 0;
      if (block.stage == Stage::kHere && is_free) break;
      if (block.stage == Stage::kWriting && use == Use::kRead) break;
      if (block.stage == Stage::kAway) {
        if (asked && block.read_failed) throw Unreadable(message_of(block.error));
        const int64_t needed = room_of(block, bytes);
        if (make_room(needed, 0) || !any_will_end()) {
          take_buffer(block, needed);
          asked = true;
          if (block.bytes > 0) {
            begin(index, Stage::kReading, /*first=*/true);
          } else {
            block.stage = Stage::kHere;
          }
          continue;
        }
        ++starving_;
        changed_.wait(mutex_);
        --starving_;
        continue;
      }
      changed_.wait(mutex_);
    }
    ++block.users;
    block.is_being_changed = use == Use::kChange;
    try {
      if (bytes > block.buffer->capacity_bytes) grow(block, bytes);
    } catch (...) {
      --block.users;
      block.is_being_changed = false;
      throw;
    }
    block.bytes = std::max(block.bytes, bytes);
    stats_.waited_ms += now_ms() - began_ms;
    return block.buffer->memory.slice(0, block.buffer->offset, block.buffer->offset + block.bytes);
  }

  void release(size_t index, Use use) {
    {
      const MutexLock lock(mutex_);
      Block& block = blocks_[index];
      --block.users;
      if (use == Use::kChange) {
        block.is_being_changed = false;
        block.is_changed = true;
        to_write_.push_back(index);
      }
    }
    changed_.notify_all();
  }

  void expect(std::vector<size_t> order) {
    {
      const MutexLock lock(mutex_);
      expected_.insert(expected_.end(), order.begin(), order.end());
      order_ = std::move(order);
    }
    changed_.notify_all();
  }

  void over(size_t index) {
    {
      const MutexLock lock(mutex_);
      const auto found = std::ranges::find(expected_, index);
      if (found != expected_.end()) expected_.erase(found);
    }
    changed_.notify_all();
  }

  void settle() {
    const MutexLock lock(mutex_);
    while (std::ranges::any_of(blocks_, is_writing)) changed_.wait(mutex_);
  }

  void raise() {
    const MutexLock lock(mutex_);
    if (!error_) {
      bool again = false;
      for (size_t i = 0; i < blocks_.size(); ++i) {
        if (!std::exchange(blocks_[i].write_failed, false)) continue;
        to_write_.push_back(i);
        again = true;
      }
      if (!again) return;
      changed_.notify_all();
      while (std::ranges::any_of(blocks_, is_writing)) changed_.wait(mutex_);
    }
    if (const std::exception_ptr error = std::exchange(error_, nullptr)) throw Error(message_of(error));
  }

  Stats stats() const {
    const MutexLock lock(mutex_);
    return stats_;
  }

 private:
  // Memory that transfers past the system's cache may use.
  struct Buffer {
    explicit Buffer(int64_t bytes)
        : capacity_bytes(bytes),
          memory(memory::HostArena::pageable().allocate(bytes + kDirect_bytes)),
          offset((kDirect_bytes - reinterpret_cast<intptr_t>(memory.const_data_ptr()) % kDirect_bytes) %
                 kDirect_bytes) {}

    std::byte* data() const { return static_cast<std::byte*>(memory.mutable_data_ptr()) + offset; }

    int64_t capacity_bytes;
    at::Tensor memory;
    int64_t offset;
  };

  enum class Stage {
    kAway,     // on the disk, or nowhere yet
    kReading,  // into its buffer
    kHere,     // in its buffer
    kWriting   // from its buffer; may be looked at
  };

  struct Block {
    Stage stage = Stage::kAway;
    int64_t bytes = 0;             // that it has, here or on the disk
    int64_t place = -1;            // its first byte in the file; negative: none yet
    int64_t place_bytes = 0;       // set aside there
    std::optional<Buffer> buffer;  // unless it is away
    int users = 0;
    int waiting = 0;          // threads in acquire()
    bool is_changed = false;  // since it was written
    bool is_being_changed = false;
    bool write_failed = false;
    bool read_failed = false;  // so that nobody reads it ahead
    // Of the transfer under way.
    int64_t begun_bytes = 0;
    int parts = 0;
    std::exception_ptr error;
  };

  // While a thread waits for a block, what comes for it is not dropped again.
  class Waiting {
   public:
    explicit Waiting(Block& block) : block_(block) { ++block_.waiting; }
    ~Waiting() { --block_.waiting; }

   private:
    Block& block_;
  };

  static std::string message_of(const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& found) {
      return found.what();
    }
  }

  static bool is_writing(const Block& block) {
    return block.stage == Stage::kWriting || (block.is_changed && !block.write_failed);
  }

  // -- memory --

  // How soon the block is expected; later than all if it is not.
  size_t turn_of(size_t index) const ROUNDPIPE_REQUIRES(mutex_) {
    const auto found = std::ranges::find(expected_, index);
    if (found != expected_.end()) return static_cast<size_t>(found - expected_.begin());
    return expected_.size() + static_cast<size_t>(std::ranges::find(order_, index) - order_.begin());
  }

  // Makes room, if blocks that are expected after `turn` have enough.
  bool make_room(int64_t bytes, size_t turn) ROUNDPIPE_REQUIRES(mutex_) {
    while (memory_bytes_ + bytes > window_bytes_) {
      std::optional<size_t> last;
      size_t last_turn = turn;
      for (size_t i = 0; i < blocks_.size(); ++i) {
        const Block& block = blocks_[i];
        if (block.stage != Stage::kHere || block.is_changed || block.users > 0 || block.waiting > 0) continue;
        const size_t own = turn_of(i);
        if (own < last_turn || (last && own == last_turn)) continue;
        last = i;
        last_turn = own;
      }
      if (!last) return false;
      drop(blocks_[*last]);
    }
    return true;
  }

  void drop(Block& block) ROUNDPIPE_REQUIRES(mutex_) {
    memory_bytes_ -= block.buffer->capacity_bytes;
    // Of which the next one is made, without pages that the system clears.
    spare_ = std::move(block.buffer);
    block.buffer.reset();
    block.stage = Stage::kAway;
  }

  // Of a block that takes so many bytes, or as many as it has. What is set aside for it on the disk it will need.
  static int64_t room_of(const Block& block, int64_t bytes) {
    return std::max(pages(block.bytes == 0 ? bytes : block.bytes), block.place_bytes);
  }

  // REQUIRES: there is room, or nothing will give any.
  void take_buffer(Block& block, int64_t bytes) ROUNDPIPE_REQUIRES(mutex_) {
    if (spare_ && spare_->capacity_bytes == bytes) {
      block.buffer = std::move(spare_);
      spare_.reset();
    } else {
      spare_.reset();
      block.buffer = Buffer(bytes);
    }
    memory_bytes_ += bytes;
    stats_.most_memory_bytes = std::max(stats_.most_memory_bytes, memory_bytes_);
  }

  // Whether anything will give memory back. If nothing does, since the disk takes nothing, the window is exceeded.
  bool any_will_end() const ROUNDPIPE_REQUIRES(mutex_) {
    return std::ranges::any_of(blocks_, [](const Block& block) {
      const bool is_used = block.users > 0 || (block.waiting > 0 && block.stage == Stage::kHere);
      return block.stage == Stage::kReading || is_writing(block) || (is_used && !block.write_failed);
    });
  }

  // REQUIRES: the block is here, and only the caller has it.
  void grow(Block& block, int64_t bytes) ROUNDPIPE_REQUIRES(mutex_) {
    make_room(pages(bytes), 0);
    const Buffer before = *block.buffer;
    take_buffer(block, pages(bytes));
    memory_bytes_ -= before.capacity_bytes;
    std::memcpy(block.buffer->data(), before.data(), static_cast<size_t>(block.bytes));
  }

  // -- transfers --

  void begin(size_t index, Stage stage, bool first) ROUNDPIPE_REQUIRES(mutex_) {
    Block& block = blocks_[index];
    block.stage = stage;
    block.begun_bytes = 0;
    block.error = nullptr;
    block.read_failed = false;
    if (stage == Stage::kWriting) {
      block.is_changed = false;
      block.write_failed = false;
      if (const int64_t bytes = pages(block.bytes); bytes > block.place_bytes) {
        block.place = end_;
        block.place_bytes = bytes;
        end_ += bytes;
      }
    }
    std::deque<size_t>& queue = stage == Stage::kReading ? reading_ : writing_;
    first ? queue.push_front(index) : queue.push_back(index);
    changed_.notify_all();
  }

  // Begins to read the next block that is expected and not here, if it belongs into the window.
  bool read_ahead() ROUNDPIPE_REQUIRES(mutex_) {
    if (starving_ > 0) return false;
    int64_t sum = 0;
    std::vector<bool> seen(blocks_.size(), false);
    for (size_t turn = 0; turn < expected_.size() + order_.size(); ++turn) {
      const size_t index = turn < expected_.size() ? expected_[turn] : order_[turn - expected_.size()];
      Block& block = blocks_[index];
      if (seen[index] || block.bytes == 0) continue;
      seen[index] = true;
      const int64_t needed = room_of(block, block.bytes);
      sum += needed;
      if (sum > window_bytes_) return false;
      if (block.stage != Stage::kAway || block.read_failed) continue;
      if (!make_room(needed, turn + 1)) return false;
      try {
        take_buffer(block, needed);
      } catch (const std::bad_alloc&) {
        return false;  // whoever needs the block tries again, and tells
      }
      begin(index, Stage::kReading, /*first=*/false);
      return true;
    }
    return false;
  }

  bool write_behind() ROUNDPIPE_REQUIRES(mutex_) {
    std::erase_if(to_write_, [this](size_t index) ROUNDPIPE_NOT_ANALYZED { return !blocks_[index].is_changed; });
    const auto next = std::ranges::find_if(to_write_, [this](size_t index) ROUNDPIPE_NOT_ANALYZED {
      return blocks_[index].stage == Stage::kHere && !blocks_[index].is_being_changed;
    });
    if (next == to_write_.end()) return false;
    const size_t index = *next;
    to_write_.erase(next);
    begin(index, Stage::kWriting, /*first=*/false);
    return true;
  }

  struct Part {
    size_t block = 0;
    int64_t begin = 0, bytes = 0;
  };
  std::optional<Part> next_part(Stage stage) ROUNDPIPE_REQUIRES(mutex_) {
    std::deque<size_t>& queue = stage == Stage::kReading ? reading_ : writing_;
    if (queue.empty() && !(stage == Stage::kReading ? read_ahead() : write_behind())) return std::nullopt;
    Block& block = blocks_[queue.front()];
    const int64_t all = pages(block.bytes);
    const Part part{queue.front(), block.begun_bytes, std::min(kPart_bytes, all - block.begun_bytes)};
    block.begun_bytes += part.bytes;
    ++block.parts;
    if (block.begun_bytes == all) queue.pop_front();
    return part;
  }

  void transfer(const Part& part, Stage stage, std::byte* data, int64_t place) {
    int64_t done = 0;
    if (stage == Stage::kReading) {
      if (file_.direct) done = file_.direct->read_direct(place, data, part.bytes);
      if (done == part.bytes) return;
      file_.file.read(place + done, data + done, part.bytes - done);
      return file_.file.forget(place + done, part.bytes - done);
    }
    if (file_.direct) done = file_.direct->write_direct(place, data, part.bytes);
    if (done == part.bytes) return;
    file_.file.write(place + done, data + done, part.bytes - done);
    // Only this tells whether the disk has taken it.
    file_.file.sync();
    file_.file.forget(place + done, part.bytes - done);
  }

  void finish(size_t index, Stage stage) ROUNDPIPE_REQUIRES(mutex_) {
    Block& block = blocks_[index];
    block.stage = Stage::kHere;
    if (stage == Stage::kReading) {
      stats_.read_bytes += block.error ? 0 : block.bytes;
      block.read_failed = block.error != nullptr;
      if (block.read_failed) drop(block);
      return;
    }
    stats_.written_bytes += block.error ? 0 : block.bytes;
    if (!block.error) return;
    block.is_changed = block.write_failed = true;
    if (!error_) error_ = block.error;
  }

  void work(Stage stage) {
    for (;;) {
      Part part;
      std::byte* data = nullptr;
      int64_t place = 0;
      {
        const MutexLock lock(mutex_);
        std::optional<Part> next;
        while (!is_stopped_ && !(next = next_part(stage))) changed_.wait(mutex_);
        if (!next) return;
        part = *next;
        const Block& block = blocks_[part.block];
        data = block.buffer->data() + part.begin;
        place = block.place + part.begin;
      }
      std::exception_ptr error;
      try {
        transfer(part, stage, data, place);
      } catch (...) {
        error = std::current_exception();
      }
      {
        const MutexLock lock(mutex_);
        Block& block = blocks_[part.block];
        if (error && !block.error) block.error = error;
        if (--block.parts == 0 && block.begun_bytes == pages(block.bytes)) finish(part.block, stage);
      }
      changed_.notify_all();
    }
  }

  const int64_t window_bytes_;
  files::FileSystem::Nameless file_;
  std::vector<std::thread> threads_;
  mutable Mutex mutex_;  // of all below; not held while bytes are moved
  Condition changed_;
  bool is_stopped_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  std::vector<Block> blocks_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::deque<size_t> reading_ ROUNDPIPE_GUARDED_BY(mutex_), writing_
      ROUNDPIPE_GUARDED_BY(mutex_);  // with parts to begin
  std::deque<size_t> to_write_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::deque<size_t> expected_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::vector<size_t> order_ ROUNDPIPE_GUARDED_BY(mutex_);
  int starving_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;          // threads in acquire() that wait for room
  int64_t end_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;           // of the file
  int64_t memory_bytes_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;  // of the blocks' buffers
  std::optional<Buffer> spare_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::exception_ptr error_ ROUNDPIPE_GUARDED_BY(mutex_);  // of a write
  Stats stats_ ROUNDPIPE_GUARDED_BY(mutex_);
};

DiskTier::DiskTier(const std::string& folder, const std::vector<int64_t>& block_bytes, int64_t window_bytes,
                   files::FileSystem& files)
    : transfers_(new Transfers(folder, block_bytes, window_bytes, files)) {}

DiskTier::~DiskTier() {
  if (!is_left_behind()) delete transfers_;
}

at::Tensor DiskTier::acquire(size_t block, int64_t bytes, Use use) { return transfers_->acquire(block, bytes, use); }
void DiskTier::release(size_t block, Use use) noexcept { transfers_->release(block, use); }
void DiskTier::expect(std::vector<size_t> order) { transfers_->expect(std::move(order)); }
void DiskTier::over(size_t block) noexcept { transfers_->over(block); }
void DiskTier::settle() { transfers_->settle(); }
void DiskTier::raise() { transfers_->raise(); }
DiskTier::Stats DiskTier::stats() const { return transfers_->stats(); }

}  // namespace roundpipe::storage
