#pragma once

#include <vector>

#include <roundpipe/language/language_model.h>
#include <roundpipe/tokens/rows.h>

namespace roundpipe {

// Reads rows of a token file as a batch. Each piece of a row is a document of its own: positions restart with it, and
// its first token is not predicted. Rows of fewer tokens than the longest are filled up behind: with documents that do
// not count or, for RowKind::kPadded, with padding, which has an attention mask. Any thread.
LanguageBatch read_batch(const tokens::TokenFile& file, const std::vector<std::vector<tokens::Piece>>& rows,
                         tokens::RowKind kind);

}  // namespace roundpipe
