#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "stream.h"

namespace fake_card {

// What is current on this thread: a card, and a stream of each.
c10::DeviceIndex current_card();
void set_current_card(c10::DeviceIndex card);
Stream& current_stream(c10::DeviceIndex card);

// Makes a card current for as long as it lives; nothing for -1.
class CardGuard {
 public:
  explicit CardGuard(c10::DeviceIndex card) : before_(current_card()) {
    if (card >= 0) set_current_card(card);
  }
  ~CardGuard() { set_current_card(before_); }
  CardGuard(const CardGuard&) = delete;
  CardGuard& operator=(const CardGuard&) = delete;

 private:
  const c10::DeviceIndex before_;
};

}  // namespace fake_card
