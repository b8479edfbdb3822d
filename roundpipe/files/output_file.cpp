#include <roundpipe/files/output_file.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/files/crc32c.h>

namespace roundpipe::files {
namespace {

// Whether [offset, offset + bytes) meets a range of a map from offsets to ranges.
template <typename Map, typename Size>
bool meets(const Map& ranges, int64_t offset, int64_t bytes, Size size) {
  const auto behind = ranges.lower_bound(offset);
  if (behind != ranges.end() && behind->first < offset + bytes) return true;
  return behind != ranges.begin() && std::prev(behind)->first + size(std::prev(behind)->second) > offset;
}

// Files and pieces from these sizes on go past the system's cache, in parts of this one.
constexpr int64_t kLargeFile_bytes = 1 << 20;
constexpr int64_t kLargePiece_bytes = 128 << 10;
constexpr int64_t kPart_bytes = 4 << 20;

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<char, Free>;

Buffer aligned_buffer(int64_t bytes) {
  auto* memory = static_cast<char*>(std::aligned_alloc(kDirect_bytes, static_cast<std::size_t>(bytes)));
  if (memory == nullptr) throw std::bad_alloc();
  return Buffer(memory);
}

int64_t checked(const std::string& name, int64_t bytes) {
  if (bytes >= 0) return bytes;
  throw std::invalid_argument(concat("[checkpoint] '", name, "' was announced with ", bytes,
                                     " bytes, expected 0 or more; announce the file's final size"));
}

}  // namespace

OutputFile::OutputFile(FileSystem& files, const std::string& folder, std::string name, int64_t bytes)
    : name_(std::move(name)),
      bytes_(checked(name_, bytes)),
      file_(files.create(join(folder, name_))),
      direct_([&]() -> std::optional<File> {
        if (bytes_ < kLargeFile_bytes) return {};
        file_.reserve(bytes_);
        return files.open_direct(file_.path());
      }()) {}

void OutputFile::reserve(int64_t offset, int64_t bytes) {
  MutexLock lock(mutex_);
  if (finishing_) {
    throw std::invalid_argument(concat("[checkpoint] '", name_,
                                       "' got a piece after it had been finished; write all "
                                       "pieces before"));
  }
  if (offset < 0 || bytes < 0 || bytes > bytes_ - offset) {
    throw std::invalid_argument(concat("[checkpoint] '", name_, "' got ", bytes, " bytes at ", offset,
                                       ", expected pieces within its announced ", bytes_, " bytes"));
  }
  if (bytes == 0) return;
  if (meets(being_written_, offset, bytes, [](int64_t size) { return size; }) ||
      meets(written_, offset, bytes, [](const Piece& piece) { return piece.bytes; })) {
    throw std::invalid_argument(concat("[checkpoint] '", name_, "' got ", bytes, " bytes at ", offset,
                                       ", some of which were written before; write each byte once"));
  }
  being_written_.emplace(offset, bytes);
}

void OutputFile::landed(int64_t offset, Piece piece) {
  MutexLock lock(mutex_);
  being_written_.erase(offset);
  const auto after = written_.find(offset + piece.bytes);
  if (after != written_.end()) {
    piece = {piece.bytes + after->second.bytes,
             crc32c_combine(piece.crc32c, after->second.crc32c, static_cast<uint64_t>(after->second.bytes))};
    written_.erase(after);
  }
  const auto behind = written_.upper_bound(offset);
  if (behind != written_.begin()) {
    auto& [start, before] = *std::prev(behind);
    if (start + before.bytes == offset) {
      before = {before.bytes + piece.bytes,
                crc32c_combine(before.crc32c, piece.crc32c, static_cast<uint64_t>(piece.bytes))};
      return;
    }
  }
  written_.emplace(offset, piece);
}

// Through the system's cache. Returns the checksum.
uint32_t OutputFile::write(int64_t offset, const char* data, int64_t bytes) {
  uint32_t crc = 0;
  for (int64_t done = 0; done < bytes;) {
    const int64_t part = std::min(bytes - done, kPart_bytes);  // stays in the processor's cache between both
    crc = crc32c(data + done, static_cast<std::size_t>(part), crc);
    file_.write(offset + done, data + done, part);
    done += part;
  }
  return crc;
}

// Whole pages past it, copied to where the disk takes them from. `seed`: the checksum of what came before.
uint32_t OutputFile::write_direct(int64_t offset, const char* data, int64_t bytes, uint32_t seed) {
  const Buffer buffer = aligned_buffer(std::min(bytes, kPart_bytes));
  uint32_t crc = seed;
  for (int64_t done = 0; done < bytes;) {
    const int64_t part = std::min(bytes - done, kPart_bytes);
    std::memcpy(buffer.get(), data + done, static_cast<std::size_t>(part));
    crc = crc32c(buffer.get(), static_cast<std::size_t>(part), crc);
    const int64_t written = direct_->write_direct(offset + done, buffer.get(), part);
    file_.write(offset + done + written, buffer.get() + written, part - written);
    done += part;
  }
  return crc;
}

void OutputFile::write_at(int64_t offset, const void* data, int64_t bytes) {
  reserve(offset, bytes);
  if (bytes == 0) return;
  const auto* from = static_cast<const char*>(data);
  uint32_t crc = 0;
  try {
    const int64_t head = std::min(bytes, align_up(offset, kDirect_bytes) - offset);
    const int64_t pages = (bytes - head) / kDirect_bytes * kDirect_bytes;
    if (direct_ && pages >= kLargePiece_bytes) {
      crc = write_direct(offset + head, from + head, pages, write(offset, from, head));
      const int64_t tail = bytes - head - pages;
      crc = crc32c_combine(crc, write(offset + head + pages, from + head + pages, tail), static_cast<uint64_t>(tail));
    } else {
      crc = write(offset, from, bytes);
    }
  } catch (...) {
    MutexLock lock(mutex_);
    being_written_.erase(offset);
    if (!failure_) failure_ = std::current_exception();
    throw;
  }
  landed(offset, {bytes, crc});
}

FileRecord OutputFile::finish() {
  FileRecord record{name_, bytes_, 0};
  {
    MutexLock lock(mutex_);
    if (record_) return *record_;
    if (failure_) std::rethrow_exception(failure_);
    int64_t written_bytes = 0;
    for (const auto& [offset, piece] : written_) written_bytes += piece.bytes;
    if (finishing_ || !being_written_.empty() || written_bytes != bytes_) {
      throw Error(concat("[checkpoint] '", name_, "' is finished with ", written_bytes, " of its ", bytes_,
                         " bytes written", finishing_ ? " by two threads" : "",
                         "; write every piece, and finish once"));
    }
    finishing_ = true;
    if (!written_.empty()) record.crc32c = written_.begin()->second.crc32c;  // all neighbours are joined
  }
  try {
    if (direct_) direct_->close();
    file_.sync();
    file_.close();
  } catch (...) {
    MutexLock lock(mutex_);
    failure_ = std::current_exception();
    throw;
  }
  MutexLock lock(mutex_);
  record_ = record;
  return record;
}

}  // namespace roundpipe::files
