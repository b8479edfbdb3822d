#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace roundpipe {

// Bytes of the fp32 logits of a language model that exist at a time where a loss chooses its chunks. Each chunk reads
// and writes the whole gradient of the head, which takes much of a card's time if chunks are short. Never a function of
// what is free, since the chunks decide about the bits.
constexpr std::int64_t chunk_logit_bytes(bool on_host) { return std::int64_t{on_host ? 64 : 1024} << 20; }

// What a training that is loaded goes on with, in place of its own choice.
struct KeptChunks {
  std::int64_t logit_bytes = 0;
  std::string notice;  // for the user
};

// The size of chunks belongs to the bits, so it is that of the checkpoint; none if the model's own is to stay.
// `is_said`: whether the checkpoint says something; if not, it is from before cards had larger chunks than the host.
// `saved`, `own`: none where the loss does not choose its chunks. `model`: its name.
std::optional<KeptChunks> kept_chunks(bool is_said, std::optional<std::int64_t> saved, std::optional<std::int64_t> own,
                                      const std::string& model);

}  // namespace roundpipe
