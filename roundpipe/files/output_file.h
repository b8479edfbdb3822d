#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <string>

#include <roundpipe/core/mutex.h>
#include <roundpipe/files/file_system.h>

namespace roundpipe::files {

// What a manifest knows of a file.
struct FileRecord {
  std::string name;  // in its folder
  int64_t bytes = 0;
  uint32_t crc32c = 0;  // of the whole file

  bool operator==(const FileRecord&) const = default;
};

// A new file that is being written, in pieces of any order. Each byte is written once, and its checksum is taken on the
// way. Large files get their room on the disk at the start, and go past the system's cache: copying into it takes more
// of the processor than all the rest, and what it then holds is memory that training lacks. Thread safety: any thread;
// pieces are written by the threads that bring them, side by side.
class OutputFile {
 public:
  // Makes the file `name` in `folder`. `bytes`: its size in the end; a full disk is an Error.
  OutputFile(FileSystem& files, const std::string& folder, std::string name, int64_t bytes);
  // Removes nothing: whoever made the folder removes it.
  ~OutputFile() = default;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  const std::string& name() const { return name_; }
  int64_t bytes() const { return bytes_; }

  // Writes a piece; `data` is not used after the call. Pieces of some megabytes are fastest, and while a
  // call runs, it takes 4 MiB for each.
  // Throws std::invalid_argument for a piece that leaves the announced size or overlaps an earlier one, and Error when
  // the disk refuses. After an Error, the file cannot be finished.
  void write_at(int64_t offset, const void* data, int64_t bytes);

  // Makes the file durable, closes it, and returns what it is. All pieces must have been written: a missing one is an
  // Error. May be called again, and then returns the same.
  FileRecord finish();

 private:
  struct Piece {
    int64_t bytes = 0;
    uint32_t crc32c = 0;
  };

  void reserve(int64_t offset, int64_t bytes);
  uint32_t write(int64_t offset, const char* data, int64_t bytes);
  uint32_t write_direct(int64_t offset, const char* data, int64_t bytes, uint32_t seed);
  void landed(int64_t offset, Piece piece);

  const std::string name_;
  const int64_t bytes_;
  File file_;
  std::optional<File> direct_;  // of the same file

  Mutex mutex_;
  // Protected by mutex_.
  std::map<int64_t, int64_t> being_written_ ROUNDPIPE_GUARDED_BY(mutex_);  // offset -> bytes
  std::map<int64_t, Piece> written_ ROUNDPIPE_GUARDED_BY(mutex_);          // offset -> piece; neighbours are joined
  std::exception_ptr failure_ ROUNDPIPE_GUARDED_BY(mutex_);
  bool finishing_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  std::optional<FileRecord> record_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace roundpipe::files
