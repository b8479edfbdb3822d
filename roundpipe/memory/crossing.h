#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe::memory {

class HostArena;

// The memory layout of a tensor that crosses the boundary between two layers, as a value or as a gradient. Kernels
// choose their path, and so their rounding, by strides and alignment. One rule for every boundary, whether or not a
// stage ends there, makes the bits independent of plans.
//
// Broadcast dimensions (stride 0, size > 1) stay broadcast and travel once. For the other dimensions, the span counts:
// the elements from the first to the last one touched. If the span is at most twice the number of values, the tensor
// keeps its strides, and its address modulo kKept_bytes, wherever it goes. With a wider span, it is made dense and
// keeps the order of its dimensions. A tensor whose elements overlap (unfold) has a short span and keeps overlapping.
// Lazy conjugates and negatives are resolved.
//
// Nothing here needs or makes autograd history, unless stated. Thread safety: any thread.

inline constexpr int64_t kKept_bytes = 64;

// Whether the rule applies to `tensor`: strided, with memory of its own. Other tensors (sparse, nested, meta,
// subclasses that dispatch to Python) never travel.
bool has_span(const at::Tensor& tensor);

// Returns `tensor` with the layout that it has beyond the boundary: itself if its layout may stay, else a copy on its
// device. Autograd records this. A tensor without a span is returned unchanged.
at::Tensor settled(const at::Tensor& tensor);

// Returns a gradient with the layout that it has beyond the boundary, like settled. A sparse gradient or a zero tensor
// is made dense first, so that it has a span.
at::Tensor settled_gradient(const at::Tensor& gradient);

// Returns `tensor` with every broadcast dimension cut to size 1. Sets `expanded_sizes` if there is one.
at::Tensor without_broadcast(const at::Tensor& tensor, std::vector<int64_t>& expanded_sizes);

// Returns uninitialized memory for a copy of `tensor`: same sizes, strides and dtype, same address modulo kKept_bytes.
// Takes settled_bytes, plus less than kKept_bytes in front. REQUIRES: `tensor` is settled, without broadcast
// dimensions.
at::Tensor empty_alike(const at::Tensor& tensor, const at::TensorOptions& options);

// Does the same in host memory of `arena`.
at::Tensor empty_alike(const at::Tensor& tensor, HostArena& arena);

// Returns the elements from the first to the last one touched, in one dimension; shares memory. Copying them copies the
// tensor, including its gaps, as one run of bytes. REQUIRES: as empty_alike.
at::Tensor flat_span(const at::Tensor& tensor);

// Returns a copy on `device` with the same layout; broadcast dimensions stay broadcast. REQUIRES: `tensor` is settled.
at::Tensor copy_alike(const at::Tensor& tensor, c10::Device device);
inline at::Tensor copy_alike(const at::Tensor& tensor) { return copy_alike(tensor, tensor.device()); }

// The bytes of a copy of `tensor` beyond a boundary, broadcast dimensions counted once; 0 for a tensor without a span.
int64_t settled_bytes(const at::Tensor& tensor);
// Of all of them.
int64_t settled_bytes(const std::vector<at::Tensor>& tensors);

// Whether the spans of the two tensors share memory, so that a write to one may change the other.
bool spans_overlap(const at::Tensor& a, const at::Tensor& b);

// The index of the first of `tensors` that is the same object as `tensor`; tensors.size() if none is.
inline size_t place_of(const at::Tensor& tensor, const std::vector<at::Tensor>& tensors) {
  size_t place = 0;
  while (place < tensors.size() && !tensors[place].is_same(tensor)) ++place;
  return place;
}

}  // namespace roundpipe::memory
