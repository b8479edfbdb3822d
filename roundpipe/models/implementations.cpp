#include <roundpipe/models/implementations.h>

#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe::models {

Attention parse_attention(std::string_view name) {
  if (name == "eager") return Attention::kEager;
  if (name == "sdpa") return Attention::kSdpa;
  if (name == "packed") return Attention::kPacked;
  throw std::invalid_argument(
      concat("[decoder] the attention is '", name, "', expected one of eager, sdpa and packed"));
}

std::string_view attention_name(Attention attention) {
  if (attention == Attention::kEager) return "eager";
  return attention == Attention::kSdpa ? "sdpa" : "packed";
}

Experts parse_experts(std::string_view name) {
  if (name == "eager") return Experts::kEager;
  if (name == "grouped_mm") return Experts::kGrouped;
  if (name == "batched_mm") return Experts::kBatched;
  throw std::invalid_argument(
      concat("[moe] the experts are '", name, "', expected one of eager, grouped_mm and batched_mm"));
}

}  // namespace roundpipe::models
