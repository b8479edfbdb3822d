#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include <c10/util/Exception.h>

#include "current.h"
#include "stream.h"

namespace fake_card {
namespace {

constexpr size_t kUnit_bytes = 512;                 // sizes are rounded up to multiples of this
constexpr size_t kSegment_bytes = 2 << 20;          // the smallest segment; larger ones are multiples of it
constexpr size_t kLarge_bytes = 1 << 20;            // blocks from here on have segments of their own
constexpr size_t kLargestLeftOver_bytes = 1 << 20;  // of a large block; more is split off

size_t rounded_up(size_t size, size_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// Two ranges of addresses for each card: what tensors hold, without access, and where the bytes are. Twice as large as
// the memory, for what lies scattered.
struct AddressSpace {
  AddressSpace() : card_bytes(2 * rounded_up(card_memory_bytes(), kSegment_bytes)) {
    const size_t all_bytes = card_bytes * static_cast<size_t>(card_count());
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const held = mmap(nullptr, all_bytes, PROT_NONE, flags, -1, 0);
    void* const real = mmap(nullptr, all_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    TORCH_CHECK(held != MAP_FAILED && real != MAP_FAILED, "card: no addresses for ", all_bytes, " bytes, twice");
    begin = static_cast<std::byte*>(held);
    end = begin + all_bytes;
    alias = static_cast<std::byte*>(real);
  }
  const size_t card_bytes;
  std::byte* begin;
  std::byte* end;
  std::byte* alias;
};

const AddressSpace& addresses() {
  static const AddressSpace* const space = new AddressSpace;
  return *space;
}

struct Block;
struct BySize {
  bool operator()(const Block* a, const Block* b) const;
};

struct Block {
  std::byte* data = nullptr;
  size_t size = 0;
  size_t asked = 0;
  Stream* stream = nullptr;
  Block* before = nullptr;  // neighbours in the segment
  Block* after = nullptr;
  bool is_free = false;
  std::set<Stream*> users = {};      // other streams, while allocated
  std::vector<MarkPtr> in_use = {};  // after that: what they had to do
};

bool BySize::operator()(const Block* a, const Block* b) const {
  return a->size != b->size ? a->size < b->size : a->data < b->data;
}

using FreeBlocks = std::set<Block*, BySize>;

struct CardMemory {
  std::map<std::byte*, size_t> holes;                          // addresses without a segment
  std::map<std::pair<Stream*, bool>, FreeBlocks> free_blocks;  // by stream, and whether it is for large blocks
  std::vector<Block*> leaving;                                 // freed, and not past the use by other streams
  size_t reserved = 0;
  size_t limit = 0;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

c10::CachingAllocator::Stat& total(c10::CachingAllocator::StatArray& array) { return array[0]; }

class CardAllocator final : public c10::DeviceAllocator {
 public:
  bool initialized() override { return true; }
  c10::DataPtr allocate(size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t count) const override;
  void emptyCache(c10::MempoolId_t /*pool*/) override;
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex card) override;
  void resetAccumulatedStats(c10::DeviceIndex card) override;
  void resetPeakStats(c10::DeviceIndex card) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex card) override;
  void limit(c10::DeviceIndex card, size_t limit_bytes);

  static void release(void* data);

 private:
  // REQUIRES of all: mutex_ is held.
  CardMemory& memory_of(c10::DeviceIndex card);
  Block* take(CardMemory& memory, Stream& stream, size_t size);
  Block* add_segment(CardMemory& memory, Stream& stream, size_t size);
  void free_block(Block* block);
  void make_free(CardMemory& memory, Block* block);
  void take_back_passed(CardMemory& memory);
  void release_segments(CardMemory& memory, c10::DeviceIndex card);

  static bool is_large(size_t size) { return size >= kLarge_bytes; }
  bool in_large_segment(const Block* block) const { return large_segments_.count(first_of(block)) > 0; }
  static const Block* first_of(const Block* block) {
    while (block->before != nullptr) block = block->before;
    return block;
  }
  FreeBlocks& siblings(CardMemory& memory, Block* block) {
    return memory.free_blocks[{block->stream, in_large_segment(block)}];
  }

  std::mutex mutex_;
  // Protected by mutex_.
  std::map<c10::DeviceIndex, CardMemory> memories_;
  std::map<void*, Block*> allocated_;
  std::set<const Block*> large_segments_;  // their first blocks
};

CardAllocator* allocator() {
  static auto* const one = new CardAllocator;
  return one;
}

void poison_later(Stream& stream, std::byte* data, size_t size) {
  stream.add_bookkeeping([alias = alias_of(data), size] { poison(alias, size); });
}

CardMemory& CardAllocator::memory_of(c10::DeviceIndex card) {
  const auto [entry, is_new] = memories_.try_emplace(card);
  CardMemory& memory = entry->second;
  if (is_new) {
    memory.limit = card_memory_bytes();
    memory.holes[addresses().begin + static_cast<size_t>(card) * addresses().card_bytes] = addresses().card_bytes;
  }
  return memory;
}

void CardAllocator::take_back_passed(CardMemory& memory) {
  std::vector<Block*> still;
  for (Block* block : memory.leaving) {
    const bool passed =
        std::all_of(block->in_use.begin(), block->in_use.end(), [](const MarkPtr& mark) { return mark->done(); });
    if (passed) {
      make_free(memory, block);
    } else {
      still.push_back(block);
    }
  }
  memory.leaving = std::move(still);
}

void CardAllocator::make_free(CardMemory& memory, Block* block) {
  block->in_use.clear();
  poison_later(*block->stream, block->data, block->size);
  total(memory.stats.active_bytes).decrease(block->size);
  total(memory.stats.active).decrease(1);
  FreeBlocks& free_blocks = siblings(memory, block);
  if (Block* const before = block->before; before != nullptr && before->is_free) {
    free_blocks.erase(before);
    before->size += block->size;
    before->after = block->after;
    if (block->after != nullptr) block->after->before = before;
    delete block;
    block = before;
  }
  if (Block* const after = block->after; after != nullptr && after->is_free) {
    free_blocks.erase(after);
    block->size += after->size;
    block->after = after->after;
    if (after->after != nullptr) after->after->before = block;
    delete after;
  }
  block->is_free = true;
  free_blocks.insert(block);
}

Block* CardAllocator::add_segment(CardMemory& memory, Stream& stream, size_t size) {
  const size_t segment = rounded_up(size, kSegment_bytes);
  if (memory.reserved + segment > memory.limit) return nullptr;
  const auto hole = std::find_if(memory.holes.begin(), memory.holes.end(),
                                 [segment](const auto& range) { return range.second >= segment; });
  if (hole == memory.holes.end()) return nullptr;
  const auto [data, hole_bytes] = *hole;
  memory.holes.erase(hole);
  if (hole_bytes > segment) memory.holes[data + segment] = hole_bytes - segment;
  auto* const block = new Block{.data = data, .size = segment, .stream = &stream, .is_free = true};
  if (is_large(size)) large_segments_.insert(block);
  poison_later(stream, data, segment);
  siblings(memory, block).insert(block);
  memory.reserved += segment;
  total(memory.stats.reserved_bytes).increase(segment);
  total(memory.stats.segment).increase(1);
  ++memory.stats.num_device_alloc;
  return block;
}

Block* CardAllocator::take(CardMemory& memory, Stream& stream, size_t size) {
  FreeBlocks& free_blocks = memory.free_blocks[{&stream, is_large(size)}];
  Block wanted{.size = size};
  auto found = free_blocks.lower_bound(&wanted);
  Block* block = found != free_blocks.end() ? *found : add_segment(memory, stream, size);
  if (block == nullptr) return nullptr;
  free_blocks.erase(block);
  block->is_free = false;
  const size_t left_over = block->size - size;
  if (left_over > (is_large(size) ? kLargestLeftOver_bytes : 0)) {
    auto* const rest = new Block{.data = block->data + size,
                                 .size = left_over,
                                 .stream = &stream,
                                 .before = block,
                                 .after = block->after,
                                 .is_free = true};
    if (block->after != nullptr) block->after->before = rest;
    block->after = rest;
    block->size = size;
    free_blocks.insert(rest);
  }
  return block;
}

void CardAllocator::release_segments(CardMemory& memory, c10::DeviceIndex card) {
  for (Block* block : memory.leaving) {
    for (const MarkPtr& mark : block->in_use) mark->wait();
  }
  take_back_passed(memory);
  for (auto& [of, free_blocks] : memory.free_blocks) {
    std::vector<Block*> whole;
    for (Block* block : free_blocks) {
      if (block->before == nullptr && block->after == nullptr) whole.push_back(block);
    }
    if (!whole.empty()) of.first->mark()->wait();  // for what was to be written over
    for (Block* block : whole) {
      free_blocks.erase(block);
      large_segments_.erase(block);
      madvise(alias_of(block->data), block->size, MADV_DONTNEED);
      memory.reserved -= block->size;
      total(memory.stats.reserved_bytes).decrease(block->size);
      total(memory.stats.segment).decrease(1);
      ++memory.stats.num_device_free;
      auto hole = memory.holes.emplace(block->data, block->size).first;
      if (const auto next = std::next(hole); next != memory.holes.end() && next->first == hole->first + hole->second) {
        hole->second += next->second;
        memory.holes.erase(next);
      }
      if (hole != memory.holes.begin()) {
        const auto before = std::prev(hole);
        if (before->first + before->second == hole->first) {
          before->second += hole->second;
          memory.holes.erase(hole);
        }
      }
      delete block;
    }
  }
}

c10::DataPtr CardAllocator::allocate(size_t asked) {
  const c10::DeviceIndex card = current_card();
  const c10::Device device(c10::DeviceType::PrivateUse1, card);
  check_fault(card);
  make_context(card);
  if (asked == 0) return {nullptr, device};
  Stream& stream = current_stream(card);
  const size_t size = asked < (size_t{1} << 62) ? rounded_up(asked, kUnit_bytes) : asked;
  const std::lock_guard lock(mutex_);
  CardMemory& memory = memory_of(card);
  take_back_passed(memory);
  Block* block = size > card_memory_bytes() ? nullptr : take(memory, stream, size);
  if (block == nullptr) {
    ++memory.stats.num_alloc_retries;
    release_segments(memory, card);
    if (size <= card_memory_bytes()) block = take(memory, stream, size);
  }
  if (block == nullptr) {
    ++memory.stats.num_ooms;
    throw c10::OutOfMemoryError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
        c10::str("card:", static_cast<int>(card), " is out of memory. Tried to allocate ",
                 c10::CachingAllocator::format_size(asked), "; ", c10::CachingAllocator::format_size(memory.reserved),
                 " are reserved, of ", c10::CachingAllocator::format_size(memory.limit)));
  }
  block->asked = asked;
  allocated_[block->data] = block;
  total(memory.stats.allocation).increase(1);
  total(memory.stats.allocated_bytes).increase(block->size);
  total(memory.stats.requested_bytes).increase(asked);
  total(memory.stats.active_bytes).increase(block->size);
  total(memory.stats.active).increase(1);
  return {block->data, block->data, &release, device};
}

void CardAllocator::free_block(Block* block) {
  CardMemory& memory = memory_of(block->stream->card());
  total(memory.stats.allocation).decrease(1);
  total(memory.stats.allocated_bytes).decrease(block->size);
  total(memory.stats.requested_bytes).decrease(block->asked);
  if (block->users.empty()) return make_free(memory, block);
  for (Stream* user : block->users) block->in_use.push_back(user->mark());
  block->users.clear();
  memory.leaving.push_back(block);
}

void CardAllocator::release(void* data) {
  CardAllocator& self = *allocator();
  const std::lock_guard lock(self.mutex_);
  const auto found = self.allocated_.find(data);
  if (found == self.allocated_.end()) return;
  Block* const block = found->second;
  self.allocated_.erase(found);
  self.free_block(block);
}

void CardAllocator::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  Stream& user = stream_of(stream.device_index(), stream.id());
  const std::lock_guard lock(mutex_);
  const auto found = allocated_.find(pointer.get());
  if (found != allocated_.end() && found->second->stream != &user) found->second->users.insert(&user);
}

void CardAllocator::copy_data(void* dest, const void* src, size_t count) const {
  Stream& stream = current_stream(card_of_address(dest));
  stream.add("copy of a storage", [to = alias_of(dest), from = alias_of(src), count] { std::memcpy(to, from, count); });
}

void CardAllocator::emptyCache(c10::MempoolId_t /*pool*/) {
  const std::lock_guard lock(mutex_);
  for (auto& [card, memory] : memories_) release_segments(memory, card);
}

c10::CachingDeviceAllocator::DeviceStats CardAllocator::getDeviceStats(c10::DeviceIndex card) {
  const std::lock_guard lock(mutex_);
  return memory_of(card).stats;
}

void CardAllocator::resetAccumulatedStats(c10::DeviceIndex card) {
  const std::lock_guard lock(mutex_);
  auto& stats = memory_of(card).stats;
  for (auto* array : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                      &stats.active_bytes, &stats.requested_bytes}) {
    total(*array).reset_accumulated();
  }
  stats.num_alloc_retries = stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
}

void CardAllocator::resetPeakStats(c10::DeviceIndex card) {
  const std::lock_guard lock(mutex_);
  auto& stats = memory_of(card).stats;
  for (auto* array : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                      &stats.active_bytes, &stats.requested_bytes}) {
    total(*array).reset_peak();
  }
}

std::pair<size_t, size_t> CardAllocator::getMemoryInfo(c10::DeviceIndex card) {
  const std::lock_guard lock(mutex_);
  return {card_memory_bytes() - memory_of(card).reserved, card_memory_bytes()};
}

void CardAllocator::limit(c10::DeviceIndex card, size_t limit_bytes) {
  const std::lock_guard lock(mutex_);
  memory_of(card).limit = std::min(limit_bytes, card_memory_bytes());
}

// Before anybody can ask for memory of a card.
struct Registration {
  Registration() { c10::SetAllocator(c10::DeviceType::PrivateUse1, allocator()); }
};
[[gnu::used]] const Registration registration;

}  // namespace

void* alias_of(const void* device_address) {
  if (device_address == nullptr) return nullptr;
  const auto* const address = static_cast<const std::byte*>(device_address);
  TORCH_CHECK(address >= addresses().begin && address < addresses().end, "card: ", device_address,
              " is no address of a card");
  return addresses().alias + (address - addresses().begin);
}

c10::DeviceIndex card_of_address(const void* address) {
  const auto* const place = static_cast<const std::byte*>(address);
  if (place < addresses().begin || place >= addresses().end) return -1;
  return static_cast<c10::DeviceIndex>(static_cast<size_t>(place - addresses().begin) / addresses().card_bytes);
}

void poison(void* data, size_t size_bytes) { std::memset(data, 0xFF, size_bytes); }

void limit_memory(c10::DeviceIndex card, size_t limit_bytes) { allocator()->limit(card, limit_bytes); }

c10::DeviceAllocator* card_allocator() { return allocator(); }

}  // namespace fake_card
