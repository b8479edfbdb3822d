#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <unistd.h>

#include <roundpipe/files/crc32c.h>

#include "../temporary_folder.h"

namespace roundpipe::tokens {

using support::TemporaryFolder;

template <typename Number>
void append(std::string& bytes, Number number) {
  char raw[sizeof(Number)];
  std::memcpy(raw, &number, sizeof(Number));
  bytes.append(raw, sizeof(Number));
}

// The bytes of a token file, as docs/reference/token-files.md says.
template <typename Token>
std::string token_bytes(const std::vector<std::vector<Token>>& documents, uint64_t vocabulary) {
  std::string tokens, ends;
  uint64_t count = 0;
  for (const auto& document : documents) {
    for (const Token token : document) append(tokens, token);
    append(ends, count += document.size());
  }
  std::string header = "RPTOKENS";
  append(header, uint32_t{1});
  append(header, static_cast<uint32_t>(sizeof(Token)));
  append(header, count);
  append(header, uint64_t{documents.size()});
  append(header, vocabulary);
  append(header, files::crc32c(tokens.data(), tokens.size()));
  append(header, files::crc32c(ends.data(), ends.size()));
  header.append(12, '\0');
  append(header, files::crc32c(header.data(), header.size()));
  while (tokens.size() % 8 != 0) tokens.push_back('\0');
  return header + tokens + ends;
}

inline std::string write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

}  // namespace roundpipe::tokens
