#include <roundpipe/device/virtual/accounting_allocator.h>

#include <cstring>
#include <deque>
#include <mutex>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>

namespace roundpipe::device {
namespace {

thread_local MemoryAccount* current_account = nullptr;

// Precedes every allocation. oneDNN frees with raw_deallocate, which needs context == data, so the context cannot hold
// this data.
struct alignas(64) Header {
  MemoryAccount* account;
  int64_t size_bytes;
};
static_assert(sizeof(Header) == 64, "data after the header must keep torch's 64-byte alignment");

void release(void* data) {
  if (data == nullptr) return;
  Header* header = static_cast<Header*>(data) - 1;
  if (MemoryAccount* account = header->account) {
    if (account->poison) std::memset(data, 0xFF, static_cast<size_t>(header->size_bytes));
    account->subtract(header->size_bytes);
  }
  c10::free_cpu(header);
}

class AccountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size_bytes) override {
    if (size_bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    MemoryAccount* account = current_account;
    const auto size = static_cast<int64_t>(size_bytes);
    if (account != nullptr) account->add(size);
    void* base = nullptr;
    try {
      base = c10::alloc_cpu(size_bytes + sizeof(Header));
    } catch (...) {
      if (account != nullptr) account->subtract(size);
      throw;
    }
    Header* header = new (base) Header{account, size};
    void* data = header + 1;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* dest, const void* src, std::size_t count) const override { default_copy_data(dest, src, count); }
};

}  // namespace

void MemoryAccount::add(int64_t size_bytes) {
  const int64_t now = current_bytes.fetch_add(size_bytes) + size_bytes;
  const int64_t limit = limit_bytes.load();
  if (limit > 0 && now > limit) {
    current_bytes.fetch_sub(size_bytes);
    throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                                concat("[", device_name, "] out of memory: ", format_bytes(size_bytes),
                                       " were asked for, ", format_bytes(now - size_bytes), " of ", format_bytes(limit),
                                       " are in use; raise memory= of the device, or give it less work at a time"));
  }
  allocated_bytes.fetch_add(size_bytes);
  int64_t peak = peak_bytes.load();
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
  }
}

void MemoryAccount::subtract(int64_t size_bytes) noexcept { current_bytes.fetch_sub(size_bytes); }

MemoryAccount* make_account(std::string device_name, int64_t limit_bytes, bool poison) {
  // Never destroyed: a tensor may be freed after everything else. Reachable, so that leak checkers find no leak.
  static std::mutex mutex;
  static auto* accounts = new std::deque<MemoryAccount>;  // protected by mutex
  const std::lock_guard lock(mutex);
  MemoryAccount& account = accounts->emplace_back();
  account.device_name = std::move(device_name);
  account.limit_bytes = limit_bytes;
  account.poison = poison;
  return &account;
}

AccountScope::AccountScope(MemoryAccount* account) : previous_(current_account) { current_account = account; }

AccountScope::~AccountScope() { current_account = previous_; }

void install_accounting_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    static AccountingAllocator* allocator = new AccountingAllocator;
    c10::SetCPUAllocator(allocator);
  });
}

}  // namespace roundpipe::device
