#include <roundpipe/core/loss_chunks.h>

#include <roundpipe/core/error.h>

namespace roundpipe {

std::optional<KeptChunks> kept_chunks(bool is_said, std::optional<std::int64_t> saved, std::optional<std::int64_t> own,
                                      const std::string& model) {
  if (!is_said) saved = chunk_logit_bytes(/*on_host=*/true);
  if (!saved || !own || *saved == *own) return std::nullopt;
  return KeptChunks{*saved,
                    concat("[load_checkpoint] chunks of the loss of ", model, " have ", *saved >> 20,
                           " MiB of logits, as in the checkpoint, so that results stay the same; here, they would "
                           "have ",
                           *own >> 20, " MiB")};
}

}  // namespace roundpipe
