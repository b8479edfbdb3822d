#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include <roundpipe/models/decoder.h>

namespace roundpipe::models {

// What tells a microbatch's tokens apart.
struct TokenPlaces {
  int64_t rows = 0;
  int64_t tokens = 0;
  at::Tensor attention_mask;  // [rows, tokens], 0 for padding; undefined: there is none
  at::Tensor positions;       // [rows or 1, tokens], which restart with each document; undefined: one document a row
};

// The mask that a decoder layer takes for these tokens, as transformers makes it: tokens see themselves and what is
// before them, but no padding; without an attention mask, only their own document; and with `window`, only so many
// tokens, themselves included. None: plainly causal.
// kSdpa: bool [rows, 1, tokens, tokens]. kEager: the same in `dtype`, 0 or its least number, and never none. kPacked:
// int [rows, 1 + n], the table that ops::read_documents reads, which is told of the positions as well. Waits for the
// device of an attention mask or of positions, to see whether a mask is needed.
std::optional<at::Tensor> make_mask(Attention attention, const TokenPlaces& places, std::optional<int64_t> window,
                                    c10::ScalarType dtype, c10::Device device);

}  // namespace roundpipe::models
