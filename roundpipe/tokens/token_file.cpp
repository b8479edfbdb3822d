#include <roundpipe/tokens/token_file.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include <roundpipe/core/error.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/files/crc32c.h>
#include <roundpipe/files/file_system.h>
#include <roundpipe/tokens/header.h>

namespace roundpipe::tokens {

namespace {

constexpr auto kHeaderBytes = static_cast<int64_t>(sizeof(Header));
constexpr int64_t kPartBytes = 8 << 20;

template <typename Token>
void widen(const std::vector<char>& bytes, int64_t count, int64_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    Token token;
    std::memcpy(&token, bytes.data() + static_cast<size_t>(i) * sizeof(Token), sizeof(Token));
    to[i] = token;
  }
}

files::File open(const std::string& path, files::FileSystem& files) {
  if (files.look(path).kind == files::EntryKind::kNothing) {
    throw std::invalid_argument(concat("[tokens] there is no ", path, ", expected a token file; name another one"));
  }
  return files.open_to_read(path);
}

}  // namespace

TokenFile::TokenFile(const std::string& path) : TokenFile(path, files::FileSystem::real()) {}

TokenFile::TokenFile(const std::string& path, files::FileSystem& files)
    : path_(path), file_(std::make_unique<files::File>(open(path, files))) {
  const int64_t size = file_->size();
  Header header{};
  if (size >= kHeaderBytes) file_->read(0, &header, kHeaderBytes);
  if (std::memcmp(header.magic, Header::kMagic, sizeof(Header::kMagic)) != 0) {
    throw std::invalid_argument(concat("[tokens] ", path, " is no token file, expected one that begins with RPTOKENS; ",
                                       "make it with `roundpipe tokenize`"));
  }
  if (header.version != Header::kVersion) {
    throw Error(concat("[tokens] ", path, " has version ", header.version, ", expected ", Header::kVersion,
                       "; make it again, or use a newer program"));
  }
  if (files::crc32c(&header, kHeaderBytes - sizeof(header.checksum)) != header.checksum) {
    refuse("its header does not have its checksum");
  }
  constexpr uint64_t kMost = uint64_t{1} << 48;
  token_bytes_ = header.token_bytes;
  vocabulary_ = static_cast<int64_t>(header.vocabulary);
  checksum_ = header.tokens_checksum;
  const int64_t most_vocabulary = token_bytes_ == 2 ? Header::kMostOfTwoBytes : Header::kMostVocabulary;
  if ((token_bytes_ != 2 && token_bytes_ != 4) || header.tokens == 0 || header.tokens > kMost ||
      header.documents == 0 || header.documents > header.tokens || vocabulary_ < 1 || vocabulary_ > most_vocabulary) {
    refuse("its header holds numbers that do not fit each other");
  }
  const int64_t ends_at = kHeaderBytes + (static_cast<int64_t>(header.tokens) * token_bytes_ + 7) / 8 * 8;
  const auto ends_bytes = static_cast<int64_t>(header.documents * sizeof(uint64_t));
  if (size != ends_at + ends_bytes) {
    refuse(
        concat("it has ", size, " bytes, expected ", ends_at + ends_bytes, ": it was cut, or not written to its end"));
  }
  ends_.resize(header.documents);
  file_->read(ends_at, ends_.data(), ends_bytes);
  bool rises = ends_.front() > 0 && ends_.back() == header.tokens;
  for (size_t i = 1; i < ends_.size(); ++i) rises = rises && ends_[i] > ends_[i - 1];
  if (files::crc32c(ends_.data(), static_cast<size_t>(ends_bytes)) != header.ends_checksum || !rises) {
    refuse("the ends of its documents do not have their checksum, or do not rise to the number of tokens");
  }
}

TokenFile::~TokenFile() = default;
TokenFile::TokenFile(TokenFile&&) noexcept = default;
TokenFile& TokenFile::operator=(TokenFile&&) noexcept = default;

void TokenFile::refuse(const std::string& what) const {
  throw Error(concat("[tokens] ", path(), " is damaged: ", what, "; make or copy it again"));
}

const std::vector<uint64_t>& TokenFile::ends() const {
  require_not_moved_from(!ends_.empty(), "token file");
  return ends_;
}

void TokenFile::read(int64_t first, int64_t count, int64_t* to) const {
  ends();
  std::vector<char> bytes;
  for (int64_t done = 0; done < count;) {
    const int64_t part = std::min(count - done, kPartBytes / token_bytes_);
    bytes.resize(static_cast<size_t>(part * token_bytes_));
    file_->read(kHeaderBytes + (first + done) * token_bytes_, bytes.data(), part * token_bytes_);
    if (token_bytes_ == 2) {
      widen<uint16_t>(bytes, part, to + done);
    } else {
      widen<uint32_t>(bytes, part, to + done);
    }
    done += part;
  }
  const int64_t* const wrong = std::find_if(to, to + count, [this](int64_t token) { return token >= vocabulary_; });
  if (wrong != to + count) {
    refuse(concat("token ", first + (wrong - to), " is ", *wrong, ", expected less than ", vocabulary_));
  }
}

int64_t TokenFile::largest() const {
  constexpr int64_t kAtOnce = 1 << 20;
  std::vector<int64_t> part;
  int64_t largest = 0;
  for (int64_t at = 0; at < tokens(); at += kAtOnce) {
    part.resize(static_cast<size_t>(std::min(kAtOnce, tokens() - at)));
    read(at, static_cast<int64_t>(part.size()), part.data());
    largest = std::max(largest, std::ranges::max(part));
  }
  return largest;
}

void TokenFile::verify(const std::function<void(int64_t)>& progress) const {
  std::vector<char> bytes(kPartBytes);
  uint32_t checksum = 0;
  const int64_t all = tokens() * token_bytes_;
  for (int64_t at = 0; at < all; at += kPartBytes) {
    const int64_t part = std::min(kPartBytes, all - at);
    file_->read(kHeaderBytes + at, bytes.data(), part);
    checksum = files::crc32c(bytes.data(), static_cast<size_t>(part), checksum);
    if (progress) progress(part);
  }
  if (checksum != checksum_) refuse("its tokens do not have their checksum");
}

}  // namespace roundpipe::tokens
