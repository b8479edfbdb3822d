#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/quantise/part.h>

namespace roundpipe::quantise {

// A published way to store a tensor in fewer bits: codes, and a scale for each block of numbers in row-major order.
// Thread safety: any thread.
class Format {
 public:
  struct Layout {
    std::string_view name;
    std::string_view form;   // of kernels::encode
    int64_t block;           // 0: a row
    int64_t in_byte;         // codes
    int64_t multiple;        // of numbers, that a row has
    bool nested = false;     // whether scales are encoded as well, see nested_scales.h
    bool only_read = false;  // of files, and not offered to users, for whom another format is better
  };
  explicit constexpr Format(Layout layout) : layout_(layout) {}

  std::string_view name() const { return layout_.name; }
  bool is_only_read() const { return layout_.only_read; }
  bool has_nan() const { return layout_.form == "fp8"; }  // among its codes
  // Why a tensor of these sizes has no such form, to follow its name; empty: it has one.
  std::string reason_against(at::IntArrayRef sizes) const;
  // Of its parts, in their order, see Part.
  std::vector<std::string> suffixes() const;
  // What holds a tensor of these sizes. REQUIRES: there is no reason against it.
  std::vector<Part> parts(at::IntArrayRef sizes) const;
  // Whether blocks end where rows of so many numbers do.
  bool ends_rows(int64_t numbers) const { return layout_.block == 0 || numbers % layout_.block == 0; }
  // The sizes of the tensor whose codes have these.
  std::vector<int64_t> sizes_of(at::IntArrayRef codes) const;
  // The parts of bf16, fp16 or fp32 numbers, on their device. Throws std::invalid_argument for sizes that it has no
  // form for, and if a number is not finite.
  std::vector<at::Tensor> encode(const at::Tensor& numbers) const;
  // The one that has no other parts than codes and plain scales of the same values.
  const Format& flat_format() const;
  // The same tensor by codes and plain scales alone: a format that has no others, and its parts.
  std::pair<const Format*, std::vector<at::Tensor>> flat(const std::vector<at::Tensor>& parts) const;
  // The numbers, in new memory, rounded to `dtype` (bf16, fp16 or fp32) once. Without autograd. Throws
  // std::invalid_argument for parts that do not fit each other.
  at::Tensor decode(const std::vector<at::Tensor>& parts, c10::ScalarType dtype) const;

 private:
  int64_t block_of(at::IntArrayRef sizes) const { return layout_.block > 0 ? layout_.block : sizes.back(); }

  Layout layout_;
};

// "nf4": blocks of 64 with fp32 scales, 4.5 bits a number; Dettmers et al., "QLoRA: Efficient Finetuning of Quantized
//   LLMs", 2023.
// "nf4-double": the same with scales of 8 bits (section 3 there), 4.13 bits a number.
// "mxfp4": blocks of 32 in a row with scales that are powers of two, 4.25 bits a number; "OCP Microscaling Formats (MX)
//   Specification", 1.0, 2023.
// "int8": a scale for each row, 8 bits a number.
// "int4", "int4-32", "int4-64", "int4-128": a scale for each row, or for so many numbers in one; read from files alone.
// "fp8", "fp8-128": E4M3 numbers, likewise.
// Throws std::invalid_argument for other names.
const Format& find_format(std::string_view name);
// The names of those that users may choose.
std::vector<std::string> format_names();

}  // namespace roundpipe::quantise
