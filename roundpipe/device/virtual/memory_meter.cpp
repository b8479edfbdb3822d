#include <roundpipe/device/virtual/memory_meter.h>

#include <stdexcept>

namespace roundpipe::device {

namespace {

MemoryAccount* counting_account() {
  install_accounting_allocator();
  return make_account("meter", 0, false);
}

}  // namespace

MemoryMeter::MemoryMeter() : account_(counting_account()) {}

void MemoryMeter::enter() {
  if (scope_) throw std::invalid_argument("[MemoryMeter] entered twice, expected one entry at a time");
  scope_.emplace(account_);
}

}  // namespace roundpipe::device
