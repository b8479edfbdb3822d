#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include "current.h"

namespace fake_card {

inline bool on_card(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// The same sizes, strides and type on the CPU, over the bytes that a card's tensor has now; holds nothing of them. For
// kernels only: what is queued before has to be done first. A kernel that resizes it moves it to memory of its own.
// Undefined stays undefined.
at::Tensor alias_tensor(const at::Tensor& tensor);

// The same sizes, strides and type without data, to find out what an operator returns.
at::Tensor meta_tensor(const at::Tensor& tensor);

// What the kernel is given by value: a copy of a tensor of the host.
at::Tensor value_of(const at::Tensor& tensor);

// A tensor on the current card, as `meta` is; undefined for undefined.
at::Tensor empty_as(const at::Tensor& meta);

// Queues `kernel` on the card's current stream, with the settings that kernels run with.
void launch(c10::DeviceIndex card, std::string name, std::function<void()> kernel);

// Gives a storage of the current card other memory, with what it had.
void resize_storage(c10::StorageImpl* storage, size_t size_bytes);

// Gives the tensor these sizes and strides, and more memory if it needs that.
void take_shape(const at::Tensor& tensor, const at::Tensor& meta);

// Copies between cards, and between a card and the host; see _copy_from in copy.cpp.
void copy_values(const at::Tensor& dst, const at::Tensor& src, bool non_blocking);

// How often the host has waited for values of any card: copies to the host that block, and scalars that are read.
int64_t host_reads();
void note_host_read();

}  // namespace fake_card
