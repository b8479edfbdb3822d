#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe::memory {

class HostArena;

// How a tensor lies in memory when it crosses the boundary between two layers, as value or as gradient. Kernels choose
// their way, and so their rounding, by strides and alignment: one rule for every boundary, whether a stage ends there
// or not, keeps bits apart from plans.
//
// Broadcast dimensions (stride 0, size > 1) stay broadcast, and travel once. Of the rest the span counts: the elements
// from the first to the last one touched. Up to twice the values, a tensor keeps its strides, and its address modulo
// kKept_bytes, wherever it goes; one with a wider span is made dense, the order of its dimensions kept. A tensor whose
// elements overlap (unfold) has a short span, and goes on overlapping. Lazy conjugates and negatives are carried out.
//
// Nothing here needs or makes autograd history, except where said. Thread safety: any thread.

inline constexpr int64_t kKept_bytes = 64;

// Whether the rule speaks of `tensor`: strided and with memory of its own. All others (sparse, nested, meta, subclasses
// that dispatch to Python) never travel.
bool has_span(const at::Tensor& tensor);

// `tensor` as it is beyond the boundary: itself, where it may stay as it is; else a copy on its device. Seen by
// autograd. What has no span comes back as it is.
at::Tensor settled(const at::Tensor& tensor);

// The same for a gradient, which then always has a span: a sparse one is made dense.
at::Tensor settled_gradient(const at::Tensor& gradient);

// `tensor` with every broadcast dimension cut to size 1; sets `expanded_sizes` if there was one.
at::Tensor without_broadcast(const at::Tensor& tensor, std::vector<int64_t>& expanded_sizes);

// Memory for a copy of `tensor`: its sizes, strides and dtype, the same address modulo kKept_bytes, nothing written.
// Takes settled_bytes, and less than kKept_bytes in front. REQUIRES: `tensor` is settled, without broadcast dimensions.
at::Tensor empty_alike(const at::Tensor& tensor, const at::TensorOptions& options);

// The same in host memory of `arena`.
at::Tensor empty_alike(const at::Tensor& tensor, HostArena& arena);

// The elements from the first to the last one touched, in one dimension; shares memory. To copy them copies the tensor
// as one run of bytes, and what lies in its gaps with it. REQUIRES: as empty_alike.
at::Tensor flat_span(const at::Tensor& tensor);

// A copy on `device` that lies alike; broadcast dimensions stay broadcast. REQUIRES: `tensor` is settled.
at::Tensor copy_alike(const at::Tensor& tensor, c10::Device device);
inline at::Tensor copy_alike(const at::Tensor& tensor) { return copy_alike(tensor, tensor.device()); }

// What a copy of `tensor` takes beyond a boundary, broadcast dimensions once; 0 for what has no span.
int64_t settled_bytes(const at::Tensor& tensor);

// Whether the spans of the two share memory: then a write to one may change the other.
bool spans_overlap(const at::Tensor& a, const at::Tensor& b);

// The place of the first of `tensors` that is the very tensor `tensor`; their number where none is.
inline size_t place_of(const at::Tensor& tensor, const std::vector<at::Tensor>& tensors) {
  size_t place = 0;
  while (place < tensors.size() && !tensors[place].is_same(tensor)) ++place;
  return place;
}

}  // namespace roundpipe::memory
