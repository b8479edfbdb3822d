#pragma once

#include <string_view>

namespace roundpipe::models {

// How scores become outputs: transformers' "eager", which computes the matrix of scores, "sdpa", torch's own, or
// "packed", ops::packed_attention for masks that name the documents of a row, and else torch's own.
enum class Attention : int { kEager, kSdpa, kPacked };

// "eager", "sdpa" or "packed". Throws std::invalid_argument for another name.
Attention parse_attention(std::string_view name);
// The name of one.
std::string_view attention_name(Attention attention);

// How the experts compute, by transformers' names of the same operators. kEager: expert by expert, their outputs added
// in this order. kGrouped: the tokens sorted by expert, and grouped products. kBatched: a copy of the expert's matrices
// for each token.
enum class Experts : int { kEager, kGrouped, kBatched };

// "eager", "grouped_mm" or "batched_mm". Throws std::invalid_argument for another name.
Experts parse_experts(std::string_view name);

}  // namespace roundpipe::models
