#include <roundpipe/files/verify.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

#include <roundpipe/core/error.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/files/crc32c.h>
#include <roundpipe/files/manifest.h>

namespace roundpipe::files {
namespace {

constexpr int64_t kPiece_bytes = 16 << 20;
constexpr int64_t kMostPieces = 1 << 16;  // of a file, whose size may be a lie of a sparse file
constexpr int64_t kBuffer_bytes = 1 << 20;

// A part of a file, summed by one thread.
struct Piece {
  std::size_t file = 0;
  int64_t offset = 0;
  int64_t bytes = 0;
  uint32_t crc32c = 0;
};

class Verification {
 public:
  Verification(std::string folder, std::vector<FileRecord> records, FileSystem& files)
      : folder_(std::move(folder)), records_(std::move(records)), files_(files), problems_(records_.size()) {
    for (std::size_t file = 0; file < records_.size(); ++file) {
      check_size(file);
      if (!problems_[file].empty()) continue;
      const int64_t bytes = records_[file].bytes;
      total_bytes_ += bytes;
      const int64_t most = std::max(kPiece_bytes, bytes / kMostPieces);
      for (int64_t offset = 0; offset < bytes; offset += std::min(most, bytes - offset)) {
        pieces_.push_back({file, offset, std::min(most, bytes - offset), 0});
      }
    }
  }

  void run(const VerifyOptions& options) {
    std::vector<std::thread> threads;
    const std::size_t count = std::min(static_cast<std::size_t>(options.threads), pieces_.size());
    std::exception_ptr thrown;
    try {
      if (options.progress) options.progress(0, total_bytes_);
      for (std::size_t i = 0; i < count; ++i) {
        {
          MutexLock lock(mutex_);
          ++running_;
        }
        try {
          threads.emplace_back([this] { work(); });
        } catch (...) {
          MutexLock lock(mutex_);
          --running_;
          throw;
        }
      }
      watch(options.progress);
    } catch (...) {
      thrown = std::current_exception();
      MutexLock lock(mutex_);
      stopped_ = true;
    }
    for (std::thread& thread : threads) thread.join();
    if (!thrown) {
      const MutexLock lock(mutex_);
      thrown = limit_;
    }
    if (thrown) std::rethrow_exception(thrown);
  }

  // After run.
  std::vector<FileProblem> problems() ROUNDPIPE_NOT_ANALYZED {
    std::vector<uint32_t> sums(records_.size(), 0);
    for (const Piece& piece : pieces_) {
      sums[piece.file] = crc32c_combine(sums[piece.file], piece.crc32c, static_cast<uint64_t>(piece.bytes));
    }
    std::vector<FileProblem> found;
    for (std::size_t file = 0; file < records_.size(); ++file) {
      const FileRecord& record = records_[file];
      if (problems_[file].empty() && sums[file] != record.crc32c) {
        problems_[file] = concat("its checksum is ", format_crc32c(sums[file]), ", expected ",
                                 format_crc32c(record.crc32c), "; its contents were changed or damaged");
      }
      if (!problems_[file].empty()) found.push_back({record.name, problems_[file]});
    }
    return found;
  }

 private:
  void check_size(std::size_t file) ROUNDPIPE_NOT_ANALYZED {  // before there are threads
    const FileRecord& record = records_[file];
    try {
      const Entry entry = files_.look(join(folder_, record.name));
      if (entry.kind == EntryKind::kNothing) {
        problems_[file] = "it is missing";
      } else if (entry.kind != EntryKind::kFile) {
        problems_[file] = "it is no regular file";
      } else if (entry.bytes != record.bytes) {
        problems_[file] = concat("it has ", entry.bytes, " bytes, expected ", record.bytes);
      }
    } catch (const Error& error) {
      problems_[file] = error.what();
    }
  }

  // A thread: takes piece by piece.
  void work() {
    std::vector<char> buffer;
    while (true) {
      Piece* piece = nullptr;
      {
        MutexLock lock(mutex_);
        if (stopped_ || next_ == pieces_.size()) {
          --running_;
          changed_.notify_all();
          return;
        }
        piece = &pieces_[next_++];
      }
      std::string problem;
      try {
        if (buffer.empty()) buffer.resize(kBuffer_bytes);
        sum(*piece, buffer);
      } catch (const ProcessLimit&) {
        MutexLock lock(mutex_);
        limit_ = std::current_exception();
        stopped_ = true;
      } catch (const std::exception& error) {
        problem = error.what();
      }
      MutexLock lock(mutex_);
      done_bytes_ += piece->bytes;
      if (problems_[piece->file].empty()) problems_[piece->file] = problem;
      changed_.notify_all();
    }
  }

  void sum(Piece& piece, std::vector<char>& buffer) {
    File file = files_.open_to_read(join(folder_, records_[piece.file].name));
    for (int64_t done = 0; done < piece.bytes;) {
      const int64_t part = std::min(piece.bytes - done, kBuffer_bytes);
      file.read(piece.offset + done, buffer.data(), part);
      piece.crc32c = crc32c(buffer.data(), static_cast<std::size_t>(part), piece.crc32c);
      done += part;
    }
  }

  // The caller's thread, until the others have ended.
  void watch(const std::function<void(int64_t, int64_t)>& progress) {
    int64_t told_bytes = 0;
    while (true) {
      int64_t done_bytes = 0;
      bool over = false;
      {
        MutexLock lock(mutex_);
        while (running_ != 0 && done_bytes_ == told_bytes) changed_.wait(mutex_);
        done_bytes = done_bytes_;
        over = running_ == 0;
      }
      if (progress && done_bytes != told_bytes) progress(done_bytes, total_bytes_);
      told_bytes = done_bytes;
      if (over) return;
    }
  }

  const std::string folder_;
  const std::vector<FileRecord> records_;
  FileSystem& files_;
  int64_t total_bytes_ = 0;
  std::vector<Piece> pieces_;  // one at a time belongs to a thread

  Mutex mutex_;
  Condition changed_;
  // Protected by mutex_.
  std::size_t next_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  std::size_t running_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  int64_t done_bytes_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  bool stopped_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  std::exception_ptr limit_ ROUNDPIPE_GUARDED_BY(mutex_);           // a ProcessLimit
  std::vector<std::string> problems_ ROUNDPIPE_GUARDED_BY(mutex_);  // by file; empty: none
};

}  // namespace

std::vector<FileProblem> verify_step(const std::string& folder, const VerifyOptions& options, FileSystem& files) {
  Manifest manifest;
  try {
    manifest = read_manifest(folder, files);
  } catch (const Error& error) {
    return {{kManifestName, error.what()}};
  }
  return verify_files(folder, std::move(manifest.files), options, files);
}

std::vector<FileProblem> verify_files(const std::string& folder, std::vector<FileRecord> records,
                                      const VerifyOptions& options, FileSystem& files) {
  if (options.threads < 1) {
    throw std::invalid_argument(concat("[verify] threads is ", options.threads, ", expected at least 1"));
  }
  Verification verification(folder, std::move(records), files);
  verification.run(options);
  return verification.problems();
}

}  // namespace roundpipe::files
