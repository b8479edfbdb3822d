#pragma once

#include <cstddef>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

namespace fake_card {

// Memory of the cards. Tensors hold addresses that nobody can read or write; kernels use the same bytes by another
// address. So a host that touches device memory crashes, as it does with a real card.

// Where kernels find what is at `device_address`; null for null. REQUIRES: an address of a card.
void* alias_of(const void* device_address);
// The card of an address; -1 for memory that is no card's.
c10::DeviceIndex card_of_address(const void* address);

// Free memory and what is written over it: NaN as a float of any size, -1 as an integer.
void poison(void* data, size_t size_bytes);

// At most so much of the card is ever reserved; its memory is the most.
void limit_memory(c10::DeviceIndex card, size_t limit_bytes);

// Allocates from the current stream of the current card. What is freed is written over and handed out again at once,
// in the order of that stream; when other streams use it too (record_stream), not before those are past that use.
// Throws c10::OutOfMemoryError. Thread safety: any thread.
c10::DeviceAllocator* card_allocator();

}  // namespace fake_card
