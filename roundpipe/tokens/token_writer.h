#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <roundpipe/files/file_system.h>

namespace roundpipe::tokens {

// Writes a token file (docs/reference/token-files.md), which replaces what is at `path` when it is finished. One that
// is dropped before leaves nothing behind. Memory: a part of the tokens, and 8 bytes a document. Thread safety: one
// thread.
class TokenWriter {
 public:
  // Throws std::invalid_argument for a vocabulary that is no positive number below 2^31, and Error for a file that
  // cannot be written.
  TokenWriter(const std::string& path, int64_t vocabulary, files::FileSystem& files = files::FileSystem::real());
  TokenWriter(const TokenWriter&) = delete;
  TokenWriter& operator=(const TokenWriter&) = delete;
  ~TokenWriter();

  int64_t tokens() const { return ends_.empty() ? 0 : static_cast<int64_t>(ends_.back()); }
  int64_t documents() const { return static_cast<int64_t>(ends_.size()); }

  // Throws std::invalid_argument for a document that is empty or has a token outside of the vocabulary, and after
  // finish(): the file stays as it is.
  void append(const std::vector<int64_t>& document);
  // Puts the file in its place. Throws std::invalid_argument if there are no documents.
  void finish();
  // Ends without a file; nothing happens after finish().
  void discard();

 private:
  void flush();

  files::FileSystem& files_;
  const std::string path_, aside_;
  const int64_t vocabulary_;
  files::File file_;
  std::string waiting_;  // bytes of tokens that are not in the file
  int64_t written_bytes_;
  uint32_t checksum_ = 0;
  std::vector<uint64_t> ends_;
  bool is_open_ = true;
};

}  // namespace roundpipe::tokens
