#include <roundpipe/tokens/token_writer.h>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include <roundpipe/core/error.h>
#include <roundpipe/files/crc32c.h>
#include <roundpipe/tokens/header.h>

namespace roundpipe::tokens {

namespace {

constexpr size_t kAtOnceBytes = 1 << 20;

int64_t checked_vocabulary(int64_t vocabulary) {
  if (vocabulary > 0 && vocabulary <= Header::kMostVocabulary) return vocabulary;
  throw std::invalid_argument(
      concat("[tokens] vocabulary is ", vocabulary, ", expected a number from 1 to ", Header::kMostVocabulary));
}

template <typename Token>
void append_bytes(std::string& bytes, const std::vector<int64_t>& document) {
  for (const int64_t token : document) {
    const auto narrow = static_cast<Token>(token);
    bytes.append(reinterpret_cast<const char*>(&narrow), sizeof(Token));
  }
}

}  // namespace

TokenWriter::TokenWriter(const std::string& path, int64_t vocabulary, files::FileSystem& files)
    : files_(files),
      path_(path),
      aside_(concat(path, ".", ::getpid(), ".part")),
      vocabulary_(checked_vocabulary(vocabulary)),
      file_(files.open_to_update(aside_)),
      written_bytes_(sizeof(Header)) {
  file_.truncate(0);
}

TokenWriter::~TokenWriter() { discard(); }

void TokenWriter::append(const std::vector<int64_t>& document) {
  if (!is_open_) {
    throw std::invalid_argument("[tokens] the file is finished, expected no more documents; make another writer");
  }
  if (document.empty()) {
    throw std::invalid_argument("[tokens] a document is empty, expected at least one token; leave it out");
  }
  const auto [least, most] = std::ranges::minmax(document);
  if (least < 0 || most >= vocabulary_) {
    throw std::invalid_argument(concat("[tokens] a document has tokens from ", least, " to ", most, ", expected 0 to ",
                                       vocabulary_ - 1, ", the tokenizer's vocabulary"));
  }
  if (vocabulary_ <= Header::kMostOfTwoBytes) {
    append_bytes<uint16_t>(waiting_, document);
  } else {
    append_bytes<uint32_t>(waiting_, document);
  }
  ends_.push_back(static_cast<uint64_t>(tokens()) + document.size());
  if (waiting_.size() >= kAtOnceBytes) flush();
}

void TokenWriter::flush() {
  checksum_ = files::crc32c(waiting_.data(), waiting_.size(), checksum_);
  file_.write(written_bytes_, waiting_.data(), static_cast<int64_t>(waiting_.size()));
  written_bytes_ += static_cast<int64_t>(waiting_.size());
  waiting_.clear();
}

void TokenWriter::finish() {
  if (ends_.empty()) throw std::invalid_argument("[tokens] there are no documents, expected at least one");
  flush();
  const size_t ends_bytes = ends_.size() * sizeof(uint64_t);
  Header header{};
  std::ranges::copy(Header::kMagic, header.magic);
  header.version = Header::kVersion;
  header.token_bytes = vocabulary_ <= Header::kMostOfTwoBytes ? 2 : 4;
  header.tokens = static_cast<uint64_t>(tokens());
  header.documents = ends_.size();
  header.vocabulary = static_cast<uint64_t>(vocabulary_);
  header.tokens_checksum = checksum_;
  header.ends_checksum = files::crc32c(ends_.data(), ends_bytes);
  header.checksum = files::crc32c(&header, sizeof(Header) - sizeof(header.checksum));
  const char zeros[8] = {};
  const int64_t padding = (8 - written_bytes_ % 8) % 8;
  file_.write(written_bytes_, zeros, padding);
  file_.write(written_bytes_ + padding, ends_.data(), static_cast<int64_t>(ends_bytes));
  file_.write(0, &header, sizeof(Header));
  file_.sync();
  file_.close();
  files_.rename(aside_, path_);
  is_open_ = false;
}

void TokenWriter::discard() {
  if (!is_open_) return;
  is_open_ = false;
  try {
    files_.remove_tree(aside_);
  } catch (const Error&) {  // NOLINT: what cannot be removed is no token file
  }
}

}  // namespace roundpipe::tokens
