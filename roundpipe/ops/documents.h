#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe::ops {

// The documents of each row of a batch, in order; a run of padding as its negative length.
struct Documents {
  int64_t window = 0;  // tokens that a token sees, itself included; 0: all before it
  std::vector<std::vector<int64_t>> rows;
  bool padding_is_unread = false;  // rows are padded behind their tokens only, and no label of padding counts

  friend bool operator==(const Documents&, const Documents&) = default;
};

// Finds the documents of a batch, with window 0. `attention_mask` [rows, tokens] is 0 for padding; a document also ends
// where `positions` [rows or 1, tokens] do not increase by one. Undefined: not given. `labels` [rows, tokens], of which
// kIgnoredLabel does not count: of a batch of which only the loss is read. On the host; otherwise, it waits for the
// tensors' device.
Documents find_documents(const at::Tensor& attention_mask, const at::Tensor& positions, int64_t rows, int64_t tokens,
                         const at::Tensor& labels = {});

// Reads the documents from a table [rows, 1 + n], on any device: the window, then each row's lengths, then zeros. A
// document also ends where `positions` [rows or 1, tokens] do not increase by one; positions of other dimensions do not
// count. Waits for the tensors' device. Throws std::invalid_argument unless there are `rows` rows of `tokens` tokens.
Documents read_documents(const at::Tensor& table, const std::optional<at::Tensor>& positions, int64_t rows,
                         int64_t tokens);

// The same documents, in which tokens see so many.
Documents with_window(const Documents& documents, int64_t window);

// Throws std::invalid_argument unless there are `rows` rows of `tokens` tokens.
void check_documents(const Documents& documents, int64_t rows, int64_t tokens);

// Whether a row has padding.
bool has_padding(const Documents& documents);
// Whether a row has padding between two of its tokens.
bool has_inner_padding(const Documents& documents);
// Whether each row is one document and then, if anything, padding: no token has padding before it.
bool is_right_padded(const Documents& documents);
// Whether a row has two documents.
bool has_several(const Documents& documents);

}  // namespace roundpipe::ops
