#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <roundpipe/core/error.h>

namespace roundpipe::files {

// A system call failed for lack of what this process may have, memory or descriptors. It says nothing about the file.
class ROUNDPIPE_API ProcessLimit : public Error {
 public:
  using Error::Error;
};

// What lies at a path. A link is not followed.
enum class EntryKind { kNothing, kFile, kFolder, kLink, kOther };
struct Entry {
  EntryKind kind = EntryKind::kNothing;
  int64_t bytes = 0;  // of a file
};

// A system call, as a test of faults names it.
enum class Call {
  kOpen,
  kClose,
  kWrite,
  kReserve,
  kRead,
  kSync,
  kTruncate,
  kStatus,
  kRename,
  kExchange,
  kMakeFolder,
  kRemove,
  kList,
  kFreeSpace,
  kLock
};

// What places and sizes of writes past the system's cache are multiples of.
inline constexpr int64_t kDirect_bytes = 4096;

class File;

// The operations on files that checkpoints are made of. The object itself is the real file system of this machine.
// Every failure is an Error that names the operation, the path, the system's words, and what to do; see ProcessLimit.
// Thread safety: any thread.
class FileSystem {
 public:
  // `of`: what the files are of, which every message begins with.
  explicit FileSystem(std::string of = "checkpoint") : of_(std::move(of)) {}
  virtual ~FileSystem() = default;
  // The one that is used where none is given.
  static FileSystem& real();
  // The same for what memory has no room for, see storage::DiskTier.
  static FileSystem& of_disk_tier();
  const std::string& of() const { return of_; }

  // A new file, to write. Fails if anything is there.
  File create(const std::string& path);
  // An existing regular file, to read. Links are followed; a pipe or a device is refused, not waited for.
  File open_to_read(const std::string& path);
  // An existing file, to write past the system's cache with File::write_direct. Nothing where the disk's format cannot.
  std::optional<File> open_direct(const std::string& path);
  // A new file in `folder`, to read and write, that has no name any more: it is gone when it is closed, or with the
  // process, whatever ends that. `direct`: the same file, past the system's cache; nothing where the disk's format
  // cannot. Messages say which folder it is in.
  struct Nameless;
  Nameless create_nameless(const std::string& folder);
  // A file to read and write, made if it is not there.
  File open_to_update(const std::string& path);

  Entry look(const std::string& path);
  // Names, sorted, without "." and "..".
  std::vector<std::string> list(const std::string& folder);
  // Of the disk that holds `folder`, for this user.
  int64_t free_bytes(const std::string& folder);
  // A whole file of at most `most_bytes`.
  std::string read_small(const std::string& path, int64_t most_bytes);

  void make_folder(const std::string& path);
  // And the folders that it is in; each new one is durable. Nothing happens where it is there already.
  void make_folders(const std::string& path);
  // Moves a file or folder within one disk. A file at `to`, or an empty folder, is replaced.
  void rename(const std::string& from, const std::string& to);
  // Both names change their contents in one step. Returns false where the disk's format cannot do that.
  bool exchange(const std::string& one, const std::string& other);
  // Makes the names in a folder durable: what was made, renamed and removed there.
  void sync_folder(const std::string& path);
  void remove_file(const std::string& path);
  // A file, a link (not what it leads to), or a folder with all that is in it. Nothing happens where nothing is there.
  void remove_tree(const std::string& path);

  // Takes the lock of an open file, which ends when `file` is closed, or with the process. A child made by fork() does
  // not have it. False: it is held already, by another process or another File of this one.
  bool try_lock(File& file);

 protected:
  // Called before each system call. Returns 0, or the error number (errno) that the call fails with instead of being
  // made. May lessen `bytes` of a read or write, which then is short; it is 0 for other calls.
  virtual int before(Call /*call*/, const std::string& /*path*/, int64_t& /*bytes*/) { return 0; }

 private:
  friend class File;
  const std::string of_;
  // Whether `call` may be made; sets errno.
  bool allowed(Call call, const std::string& path, int64_t* bytes = nullptr);
  // Opens with `flags`, and close-on-exec.
  File open(const std::string& path, int flags, const char* purpose);
};

// An open file; closed when dropped. Reads and writes at disjoint places may be made by any threads at a time.
class File {
 public:
  File(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  File& operator=(File&&) = delete;
  ~File();

  const std::string& path() const { return path_; }
  int64_t size();
  // All of the bytes, however many calls that takes.
  void write(int64_t offset, const void* data, int64_t bytes);
  // The same past the system's cache, of a file from open_direct: `offset`, `data` and `bytes` are multiples of
  // kDirect_bytes. Returns how many bytes were written, a multiple too; fewer where the disk refuses this way.
  int64_t write_direct(int64_t offset, const void* data, int64_t bytes);
  // The same, reading.
  int64_t read_direct(int64_t offset, void* data, int64_t bytes);
  // Lets the system's cache drop these bytes, if they are on the disk. Only a hint.
  void forget(int64_t offset, int64_t bytes) noexcept;
  // Sets room aside on the disk, where its format can: then no later write finds it full.
  void reserve(int64_t bytes);
  // An Error where the file ends before.
  void read(int64_t offset, void* data, int64_t bytes);
  void truncate(int64_t bytes);
  // Returns when the bytes are on the disk. After a failure, what is there is not known: write another file.
  void sync();
  // Some disks report a failed write only here.
  void close();

 private:
  friend class FileSystem;
  File(FileSystem& files, int descriptor, std::string path)
      : files_(&files), descriptor_(descriptor), path_(std::move(path)) {}

  void end() noexcept;

  FileSystem* files_;
  int descriptor_;
  std::string path_;
  bool locked_ = false;
};

struct FileSystem::Nameless {
  File file;
  std::optional<File> direct;
};

// "folder/name"
std::string join(std::string_view folder, std::string_view name);
// The folder that a path lies in, "." for a bare name.
std::string parent_of(std::string_view path);

}  // namespace roundpipe::files
