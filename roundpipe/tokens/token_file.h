#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace roundpipe::files {
class File;
class FileSystem;
}  // namespace roundpipe::files

namespace roundpipe::tokens {

// A file of tokens and documents, opened to read; docs/reference/token-files.md is its format. Tokens are read when
// they are asked for; the documents' ends take 8 bytes each. Of a file that was moved from, tokens and documents are
// refused by std::invalid_argument. Thread safety: any thread.
class TokenFile {
 public:
  // Checks header, size and the documents' ends. Throws std::invalid_argument for a file that is no token file, and
  // Error for one that is cut, damaged or of another version.
  explicit TokenFile(const std::string& path);
  TokenFile(const std::string& path, files::FileSystem& files);
  ~TokenFile();
  TokenFile(TokenFile&&) noexcept;
  TokenFile& operator=(TokenFile&&) noexcept;

  const std::string& path() const { return path_; }
  int64_t tokens() const { return static_cast<int64_t>(ends().back()); }
  int64_t documents() const { return static_cast<int64_t>(ends().size()); }
  // Every token is smaller.
  int64_t vocabulary() const { return vocabulary_; }
  // The checksum of the tokens' bytes, as the header has it.
  uint32_t checksum() const { return checksum_; }

  // Where a document begins and ends, in tokens of the file.
  int64_t begin(int64_t document) const { return document == 0 ? 0 : end(document - 1); }
  int64_t end(int64_t document) const { return static_cast<int64_t>(ends()[static_cast<size_t>(document)]); }

  // Reads `count` tokens from `first` on into `to`. Throws Error for a token that is not of the vocabulary: the file is
  // damaged. REQUIRES: the tokens are there.
  void read(int64_t first, int64_t count, int64_t* to) const;

  // The largest token. Reads all of them. Throws Error as read() does.
  int64_t largest() const;

  // Reads all tokens and compares their checksum. `progress` is called with the bytes of each part; it may throw.
  // Throws Error if the file is damaged.
  void verify(const std::function<void(int64_t)>& progress = {}) const;

 private:
  [[noreturn]] void refuse(const std::string& what) const;
  const std::vector<uint64_t>& ends() const;

  std::string path_;
  std::unique_ptr<files::File> file_;
  int64_t token_bytes_ = 0;
  int64_t vocabulary_ = 0;
  uint32_t checksum_ = 0;
  std::vector<uint64_t> ends_;  // empty: moved from
};

}  // namespace roundpipe::tokens
