#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace roundpipe::device {

// The memory of one virtual device: what its threads allocated and nobody freed yet, with a cap.
// Thread safety: everything from any thread. Must outlive its allocations, so accounts are never destroyed.
struct MemoryAccount {
  std::string device_name;
  std::atomic<int64_t> limit_bytes{0};  // 0 = no cap
  bool poison = false;                  // fill freed memory with 0xFF: NaN in every floating type
  std::atomic<int64_t> current_bytes{0};
  std::atomic<int64_t> peak_bytes{0};
  std::atomic<int64_t> allocated_bytes{0};  // ever

  // Throws c10::OutOfMemoryError when the cap would be passed.
  void add(int64_t size_bytes);
  void subtract(int64_t size_bytes) noexcept;
};

// A new account that lives until the process ends.
MemoryAccount* make_account(std::string device_name, int64_t limit_bytes, bool poison);

// While it lives, CPU allocations of this thread count against `account` (null: against nobody).
class AccountScope {
 public:
  explicit AccountScope(MemoryAccount* account);
  ~AccountScope();
  AccountScope(const AccountScope&) = delete;
  AccountScope& operator=(const AccountScope&) = delete;

 private:
  MemoryAccount* previous_;
};

// Makes torch's CPU allocations go through the accounts, from now on and for good. Idempotent.
void install_accounting_allocator();

}  // namespace roundpipe::device
