#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include <roundpipe/models/decoder.h>
#include <roundpipe/ops/documents.h>

namespace roundpipe::models {

// What tells a microbatch's tokens apart.
struct TokenPlaces {
  int64_t rows = 0;
  int64_t tokens = 0;
  at::Tensor attention_mask;  // [rows, tokens], 0 for padding; undefined: there is none
  at::Tensor positions;       // [rows or 1, tokens], which restart with each document; undefined: one document a row
  // What ops::find_documents() finds in the two before they leave the host; not null.
  std::shared_ptr<const ops::Documents> documents;
};

struct MaskOptions {
  std::optional<int64_t> window = std::nullopt;  // tokens that a token sees, itself included
  c10::ScalarType dtype = c10::ScalarType::Float;
  // Whether padding behind a row's tokens may see padding: what it gets then is of no use, while all tokens get the
  // same. For kSdpa, a batch of such rows needs no mask.
  bool padding_may_attend = false;
  // Whether kPacked gets ops::document_starts(), with which all documents are computed at once.
  bool gives_starts = false;
};

// The mask that a decoder layer takes for these tokens, as transformers makes it: tokens see themselves and what is
// before them, but no padding; without an attention mask, only their own document. None: plainly causal.
// kSdpa: bool [rows, 1, tokens, tokens]. kEager: the same in `dtype`, 0 or its least number, and never none. kPacked:
// none, since such layers take the documents themselves, or where they begin. Does not wait for the device.
std::optional<at::Tensor> make_mask(Attention attention, const TokenPlaces& places, c10::Device device,
                                    const MaskOptions& options);

}  // namespace roundpipe::models
