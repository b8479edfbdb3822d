#include "host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "memory.h"
#include "stream.h"

namespace fake_card {
namespace {

constexpr size_t kSmallest_bytes = 4096;

struct HostBlock {
  void* data = nullptr;
  size_t size = 0;
  bool allocated = true;
  bool clean = false;  // of what its last owner has left there
  std::vector<MarkPtr> in_use = {};
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, c10::kCPU};
    size_t bytes = kSmallest_bytes;
    while (bytes < size) bytes *= 2;
    const std::lock_guard lock(mutex_);
    HostBlock* block = nullptr;
    for (auto& [place, held] : blocks_) {
      if (!held->allocated && held->size == bytes && is_passed(*held)) block = held;
    }
    if (block == nullptr) {
      void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (data == MAP_FAILED) {
        throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                                    c10::str("card: no ", bytes, " bytes of host memory to lock"));
      }
      block = new HostBlock{data, bytes};
      blocks_[data] = block;
      stats_.allocated_bytes.increase(bytes);
      stats_.allocations.increase(1);
      ++stats_.num_host_alloc;
    }
    make_clean(*block);
    block->allocated = true;
    block->clean = false;
    stats_.active_bytes.increase(block->size);
    stats_.active_requests.increase(1);
    return {block->data, block, &give_back, c10::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }

  bool record_event(void* data, void* context, c10::Stream stream) override {
    const std::lock_guard lock(mutex_);
    const auto by_context =
        std::find_if(blocks_.begin(), blocks_.end(), [context](const auto& entry) { return entry.second == context; });
    const auto found = by_context != blocks_.end() ? by_context : blocks_.find(data);
    if (found == blocks_.end() || !found->second->allocated) return false;
    found->second->in_use.push_back(stream_of(stream.device_index(), stream.id()).mark());
    return true;
  }

  void empty_cache() override {
    const std::lock_guard lock(mutex_);
    for (auto entry = blocks_.begin(); entry != blocks_.end();) {
      HostBlock& block = *entry->second;
      if (block.allocated || !is_passed(block)) {
        ++entry;
        continue;
      }
      munmap(block.data, block.size);
      stats_.allocated_bytes.decrease(block.size);
      stats_.allocations.decrease(1);
      ++stats_.num_host_free;
      delete &block;
      entry = blocks_.erase(entry);
    }
  }

  at::HostStats get_stats() override {
    const std::lock_guard lock(mutex_);
    return stats_;
  }

  void reset_accumulated_stats() override {
    const std::lock_guard lock(mutex_);
    for (auto* stat : all_stats()) stat->reset_accumulated();
  }

  void reset_peak_stats() override {
    const std::lock_guard lock(mutex_);
    for (auto* stat : all_stats()) stat->reset_peak();
  }

  bool holds(const void* address) {
    const std::lock_guard lock(mutex_);
    const auto next = blocks_.upper_bound(const_cast<void*>(address));
    if (next == blocks_.begin()) return false;
    const HostBlock& block = *std::prev(next)->second;
    return block.allocated && static_cast<const char*>(address) < static_cast<char*>(block.data) + block.size;
  }

 private:
  static void give_back(void* context);

  // REQUIRES of all: mutex_ is held.
  static bool is_passed(HostBlock& block) {
    std::erase_if(block.in_use, [](const MarkPtr& mark) { return mark->done(); });
    return block.in_use.empty();
  }
  static void make_clean(HostBlock& block) {
    if (!block.clean) poison(block.data, block.size);
    block.clean = true;
  }
  std::array<c10::CachingAllocator::Stat*, 4> all_stats() {
    return {&stats_.active_requests, &stats_.active_bytes, &stats_.allocations, &stats_.allocated_bytes};
  }

  std::mutex mutex_;
  // Protected by mutex_.
  std::map<void*, HostBlock*> blocks_;
  at::HostStats stats_;
};

PinnedAllocator& allocator() {
  static auto* const one = new PinnedAllocator;
  return *one;
}

void PinnedAllocator::give_back(void* context) {
  PinnedAllocator& self = allocator();
  auto& block = *static_cast<HostBlock*>(context);
  const std::lock_guard lock(self.mutex_);
  block.allocated = false;
  self.stats_.active_bytes.decrease(block.size);
  self.stats_.active_requests.decrease(1);
  if (is_passed(block)) make_clean(block);
}

struct Registration {
  Registration() { at::setHostAllocator(c10::DeviceType::PrivateUse1, &allocator()); }
};
[[gnu::used]] const Registration registration;

}  // namespace

at::HostAllocator* pinned_allocator() { return &allocator(); }

bool is_pinned(const void* address) { return allocator().holds(address); }

}  // namespace fake_card
