#pragma once

#include <cstdint>
#include <optional>

#include <roundpipe/device/virtual/accounting_allocator.h>

namespace roundpipe::device {

// Counts the CPU memory that a thread allocates and nothing has freed yet, as a virtual device does.
// Thread safety: enter() and exit() on one thread.
class MemoryMeter {
 public:
  MemoryMeter();
  // Counts what this thread allocates until exit(). Throws std::invalid_argument if it counts already.
  void enter();
  void exit() { scope_.reset(); }

  int64_t current_bytes() const { return account_->current_bytes.load(); }
  int64_t peak_bytes() const { return account_->peak_bytes.load(); }
  // Restarts the peak from what is allocated now.
  void reset_peak() { account_->peak_bytes.store(account_->current_bytes.load()); }

 private:
  MemoryAccount* const account_;
  std::optional<AccountScope> scope_;
};

}  // namespace roundpipe::device
