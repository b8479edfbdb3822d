#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace roundpipe::device {

// The memory of one virtual device: the live allocations of its threads, with a cap.
// Thread safety: everything from any thread. An account must outlive its allocations, so it is never destroyed.
struct MemoryAccount {
  std::string device_name;
  std::atomic<int64_t> limit_bytes{0};  // 0 = no cap
  bool poison = false;                  // fill freed memory with 0xFF, which is NaN in every floating type
  std::atomic<int64_t> current_bytes{0};
  std::atomic<int64_t> peak_bytes{0};
  std::atomic<int64_t> allocated_bytes{0};  // sum of all allocations so far

  // Throws c10::OutOfMemoryError, and adds nothing, if the cap would be exceeded.
  void add(int64_t size_bytes);
  void subtract(int64_t size_bytes) noexcept;
};

// Makes an account, which lives until the process ends.
MemoryAccount* make_account(std::string device_name, int64_t limit_bytes, bool poison);

// As long as a scope lives, CPU allocations of its thread count against `account` (null = against none).
class AccountScope {
 public:
  explicit AccountScope(MemoryAccount* account);
  ~AccountScope();
  AccountScope(const AccountScope&) = delete;
  AccountScope& operator=(const AccountScope&) = delete;

 private:
  MemoryAccount* previous_;
};

// Installs an allocator that counts torch's CPU allocations against the accounts, for the rest of the process.
// Idempotent.
void install_accounting_allocator();

}  // namespace roundpipe::device
