#include <roundpipe/files/file_system.h>

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <system_error>
#include <utility>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/mutex.h>

namespace roundpipe::files {
namespace {

// One call's most: a failure or an interrupt loses little, and the disk's queue is full with less.
constexpr int64_t kMostAtOnce_bytes = 16 << 20;

const char* advice(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "free some space there, keep fewer checkpoints, or choose a folder on another disk";
    case EACCES:
    case EPERM:
    case EROFS:
      return "choose a folder that this user can read and write";
    case EIO:
      return "the disk may be failing: look at the system's log, and use a folder on another disk";
    case EMFILE:
    case ENFILE:
      return "raise the limit of open files (ulimit -n)";
    case ENOLCK:
    case ENOSYS:
    case EOPNOTSUPP:
      return "that disk's format, or how it is mounted, lacks this: use a folder on another one";
    case ENAMETOOLONG:
    case ENOENT:
    case ENOTDIR:
    case ELOOP:
      return "check the path";
    default:
      return "check the path and its disk";
  }
}

// `of`: whose files they are, see FileSystem::of().
template <typename... Parts>
[[noreturn]] void fail(const std::string& of, const Parts&... what) {
  const int error = errno;
  const std::string text =
      concat("[", of, "] cannot ", what..., ": ", std::generic_category().message(error), "; ", advice(error));
  if (error == EMFILE || error == ENFILE || error == ENOMEM) throw ProcessLimit(text);
  throw Error(text);
}

// Repeats a call that a signal interrupted.
template <typename Function>
auto again(Function call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

// Descriptors with locks. A lock belongs to what a descriptor shares with its copies, also those that a fork makes:
// workers of a data loader outlive a killed parent for a while, and must not keep its lock. So a child closes them.
class Locked {
 public:
  void add(int descriptor) {
    MutexLock lock(mutex_);
    descriptors_.push_back(descriptor);
  }
  // Whether it was there.
  bool remove(int descriptor) {
    MutexLock lock(mutex_);
    return std::erase(descriptors_, descriptor) != 0;
  }

  void before_fork() ROUNDPIPE_NOT_ANALYZED { mutex_.lock(); }
  void after_fork_in_parent() ROUNDPIPE_NOT_ANALYZED { mutex_.unlock(); }
  void after_fork_in_child() ROUNDPIPE_NOT_ANALYZED {
    for (const int descriptor : descriptors_) ::close(descriptor);
    descriptors_.clear();
    mutex_.unlock();
  }

 private:
  Mutex mutex_;
  std::vector<int> descriptors_ ROUNDPIPE_GUARDED_BY(mutex_);
};

Locked& locked() {
  static auto* const instance = [] {
    static auto* const made = new Locked;
    ::pthread_atfork([] { made->before_fork(); }, [] { made->after_fork_in_parent(); },
                     [] { made->after_fork_in_child(); });
    return made;
  }();
  return *instance;
}

}  // namespace

FileSystem& FileSystem::real() {
  static FileSystem instance;
  return instance;
}

FileSystem& FileSystem::of_disk_tier() {
  // Never destroyed: a process may end while threads write.
  static auto* const instance = new FileSystem("disk");
  return *instance;
}

bool FileSystem::allowed(Call call, const std::string& path, int64_t* bytes) {
  int64_t none = 0;
  const int error = before(call, path, bytes == nullptr ? none : *bytes);
  if (error != 0) errno = error;
  return error == 0;
}

File FileSystem::open(const std::string& path, int flags, const char* purpose) {
  const int descriptor =
      again([&] { return allowed(Call::kOpen, path) ? ::open(path.c_str(), flags | O_CLOEXEC, 0666) : -1; });
  if (descriptor == -1) fail(of_, purpose, " ", path);
  return {*this, descriptor, path};
}

File FileSystem::create(const std::string& path) { return open(path, O_WRONLY | O_CREAT | O_EXCL, "create"); }

std::optional<File> FileSystem::open_direct(const std::string& path) {
  const int descriptor = again([&] {
    return allowed(Call::kOpen, path) ? ::open(path.c_str(), O_WRONLY | O_DIRECT | O_NOFOLLOW | O_CLOEXEC) : -1;
  });
  if (descriptor != -1) return File(*this, descriptor, path);
  if (errno == EINVAL || errno == EOPNOTSUPP) return {};
  fail(of_, "open ", path);
}

FileSystem::Nameless FileSystem::create_nameless(const std::string& folder) {
  static std::atomic<uint64_t> next{0};
  std::string path;
  int descriptor = -1;
  do {
    path = join(folder, concat(".roundpipe-scratch-", ::getpid(), "-", next++));
    descriptor = again([&] {
      return allowed(Call::kOpen, path) ? ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600) : -1;
    });
  } while (descriptor == -1 && errno == EEXIST);  // of a process that was killed before it could remove the name
  if (descriptor == -1) fail(of_, "make a scratch file in ", folder);
  Nameless made{File(*this, descriptor, concat("the scratch file in ", folder)), std::nullopt};
  const int direct =
      again([&] { return allowed(Call::kOpen, path) ? ::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC) : -1; });
  const int refused = errno;
  if (direct != -1) made.direct.emplace(File(*this, direct, made.file.path()));
  remove_file(path);
  errno = refused;
  if (direct == -1 && errno != EINVAL && errno != EOPNOTSUPP) fail(of_, "open ", made.file.path());
  return made;
}

File FileSystem::open_to_update(const std::string& path) {
  return open(path, O_RDWR | O_CREAT | O_NOFOLLOW, "open for writing");
}

File FileSystem::open_to_read(const std::string& path) {
  File file = open(path, O_RDONLY | O_NONBLOCK, "open");  // O_NONBLOCK: a pipe would wait for its writer
  struct stat status{};
  if (!allowed(Call::kStatus, path) || ::fstat(file.descriptor_, &status) == -1) fail(of_, "look at ", path);
  if (!S_ISREG(status.st_mode)) {
    throw Error(concat("[", of_, "] cannot read ", path, ": it is not a regular file; check the path"));
  }
  return file;
}

Entry FileSystem::look(const std::string& path) {
  struct stat status{};
  if (!allowed(Call::kStatus, path) || ::lstat(path.c_str(), &status) == -1) {
    if (errno == ENOENT || errno == ENOTDIR) return {};
    fail(of_, "look at ", path);
  }
  if (S_ISREG(status.st_mode)) return {EntryKind::kFile, static_cast<int64_t>(status.st_size)};
  if (S_ISDIR(status.st_mode)) return {EntryKind::kFolder};
  return {S_ISLNK(status.st_mode) ? EntryKind::kLink : EntryKind::kOther};
}

std::vector<std::string> FileSystem::list(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> opened(allowed(Call::kList, folder) ? ::opendir(folder.c_str()) : nullptr,
                                                   ::closedir);
  if (!opened) fail(of_, "list ", folder);
  std::vector<std::string> names;
  while (true) {
    errno = 0;
    const dirent* entry = ::readdir(opened.get());
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  if (errno != 0) fail(of_, "list ", folder);
  std::sort(names.begin(), names.end());
  return names;
}

int64_t FileSystem::free_bytes(const std::string& folder) {
  struct statvfs status{};
  if (!allowed(Call::kFreeSpace, folder) || again([&] { return ::statvfs(folder.c_str(), &status); }) == -1) {
    fail(of_, "ask for the free space of ", folder);
  }
  const auto most = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  const uint64_t blocks = status.f_bavail;
  const uint64_t unit_bytes = status.f_frsize;
  return static_cast<int64_t>(unit_bytes != 0 && blocks > most / unit_bytes ? most : blocks * unit_bytes);
}

std::string FileSystem::read_small(const std::string& path, int64_t most_bytes) {
  File file = open_to_read(path);
  const int64_t bytes = file.size();
  if (bytes > most_bytes) {
    throw Error(concat("[", of_, "] ", path, " has ", format_bytes(bytes), ", expected at most ",
                       format_bytes(most_bytes), "; it is damaged, or no file of a checkpoint"));
  }
  std::string contents(static_cast<std::size_t>(bytes), '\0');
  file.read(0, contents.data(), bytes);
  return contents;
}

void FileSystem::make_folder(const std::string& path) {
  if (!allowed(Call::kMakeFolder, path) || ::mkdir(path.c_str(), 0777) == -1) fail(of_, "make the folder ", path);
}

void FileSystem::make_folders(const std::string& path) {
  struct stat status{};  // follows links: the user's folders may be anywhere
  if (allowed(Call::kStatus, path) && ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) return;
  const std::string parent = parent_of(path);
  if (parent != path) make_folders(parent);
  make_folder(path);
  sync_folder(parent);
}

void FileSystem::rename(const std::string& from, const std::string& to) {
  if (!allowed(Call::kRename, from) || ::rename(from.c_str(), to.c_str()) == -1) fail(of_, "rename ", from, " to ", to);
}

bool FileSystem::exchange(const std::string& one, const std::string& other) {
  constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE
  if (allowed(Call::kExchange, one) &&
      ::syscall(SYS_renameat2, AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), kExchange) == 0) {
    return true;
  }
  if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) return false;
  fail(of_, "exchange ", one, " and ", other);
}

void FileSystem::sync_folder(const std::string& path) {
  File folder = open(path, O_RDONLY | O_DIRECTORY, "open the folder");
  folder.sync();
}

void FileSystem::remove_file(const std::string& path) {
  if (!allowed(Call::kRemove, path) || ::unlink(path.c_str()) == -1) fail(of_, "remove ", path);
}

void FileSystem::remove_tree(const std::string& path) {
  const EntryKind kind = look(path).kind;
  if (kind == EntryKind::kNothing) return;
  if (kind != EntryKind::kFolder) return remove_file(path);
  for (const std::string& name : list(path)) remove_tree(join(path, name));
  if (!allowed(Call::kRemove, path) || ::rmdir(path.c_str()) == -1) fail(of_, "remove the folder ", path);
}

bool FileSystem::try_lock(File& file) {
  locked().add(file.descriptor_);  // before: a fork must not come between
  file.locked_ = true;
  if (again([&] { return allowed(Call::kLock, file.path_) ? ::flock(file.descriptor_, LOCK_EX | LOCK_NB) : -1; }) ==
      0) {
    return true;
  }
  if (errno == EWOULDBLOCK) return false;
  fail(of_, "lock ", file.path_);
}

File::File(File&& other) noexcept
    : files_(other.files_),
      descriptor_(std::exchange(other.descriptor_, -1)),
      path_(std::move(other.path_)),
      locked_(std::exchange(other.locked_, false)) {}

File::~File() { end(); }

void File::end() noexcept {
  const int descriptor = std::exchange(descriptor_, -1);
  if (descriptor == -1) return;
  if (locked_) {
    if (!locked().remove(descriptor)) return;  // in a child it was closed, and the number may be another file's
    ::flock(descriptor, LOCK_UN);              // a child that is just being made may not have closed its copy
  }
  ::close(descriptor);
}

int64_t File::size() {
  struct stat status{};
  if (!files_->allowed(Call::kStatus, path_) || ::fstat(descriptor_, &status) == -1)
    fail(files_->of(), "look at ", path_);
  return static_cast<int64_t>(status.st_size);
}

void File::write(int64_t offset, const void* data, int64_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    int64_t part = std::min(bytes, kMostAtOnce_bytes);
    const ssize_t written = again([&]() -> ssize_t {
      if (!files_->allowed(Call::kWrite, path_, &part)) return -1;
      return ::pwrite(descriptor_, from, static_cast<std::size_t>(part), static_cast<off_t>(offset));
    });
    if (written == 0) errno = ENOSPC;  // no system says so; an endless loop would be worse
    if (written <= 0) fail(files_->of(), "write ", format_bytes(bytes), " at ", offset, " of ", path_);
    from += written;
    offset += written;
    bytes -= written;
  }
}

int64_t File::write_direct(int64_t offset, const void* data, int64_t bytes) {
  const auto* from = static_cast<const char*>(data);
  int64_t done = 0;
  while (done < bytes) {
    int64_t part = std::min(bytes - done, kMostAtOnce_bytes);
    const ssize_t written = again([&]() -> ssize_t {
      if (!files_->allowed(Call::kWrite, path_, &part)) return -1;
      part -= part % kDirect_bytes;
      return ::pwrite(descriptor_, from + done, static_cast<std::size_t>(part), static_cast<off_t>(offset + done));
    });
    if (written == -1 && (errno == EINVAL || errno == EOPNOTSUPP)) break;
    if (written == -1) fail(files_->of(), "write ", format_bytes(bytes - done), " at ", offset + done, " of ", path_);
    done += written - written % kDirect_bytes;
    if (written == 0 || written % kDirect_bytes != 0) break;
  }
  return done;
}

int64_t File::read_direct(int64_t offset, void* data, int64_t bytes) {
  auto* to = static_cast<char*>(data);
  int64_t done = 0;
  while (done < bytes) {
    int64_t part = std::min(bytes - done, kMostAtOnce_bytes);
    const ssize_t got = again([&]() -> ssize_t {
      if (!files_->allowed(Call::kRead, path_, &part)) return -1;
      return ::pread(descriptor_, to + done, static_cast<std::size_t>(part), static_cast<off_t>(offset + done));
    });
    if (got == -1 && (errno == EINVAL || errno == EOPNOTSUPP)) break;
    if (got == -1) fail(files_->of(), "read ", format_bytes(bytes - done), " at ", offset + done, " of ", path_);
    done += got - got % kDirect_bytes;
    if (got == 0 || got % kDirect_bytes != 0) break;
  }
  return done;
}

void File::forget(int64_t offset, int64_t bytes) noexcept {
  ::posix_fadvise(descriptor_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
}

void File::reserve(int64_t bytes) {
  // Not posix_fallocate, which writes all of it where the format has no such thing.
  const auto call = [&] {
    return files_->allowed(Call::kReserve, path_) ? ::fallocate(descriptor_, 0, 0, static_cast<off_t>(bytes)) : -1;
  };
  if (again(call) == -1 && errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) {
    fail(files_->of(), "set ", format_bytes(bytes), " aside for ", path_);
  }
}

void File::read(int64_t offset, void* data, int64_t bytes) {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    int64_t part = std::min(bytes, kMostAtOnce_bytes);
    const ssize_t got = again([&]() -> ssize_t {
      if (!files_->allowed(Call::kRead, path_, &part)) return -1;
      return ::pread(descriptor_, to, static_cast<std::size_t>(part), static_cast<off_t>(offset));
    });
    if (got == -1) fail(files_->of(), "read ", format_bytes(bytes), " at ", offset, " of ", path_);
    if (got == 0) {
      throw Error(concat("[", files_->of(), "] ", path_, " ends at byte ", offset, ", expected ", bytes,
                         " bytes more; it was cut off, or is being written"));
    }
    to += got;
    offset += got;
    bytes -= got;
  }
}

void File::truncate(int64_t bytes) {
  const auto cut = [&] {
    return files_->allowed(Call::kTruncate, path_) ? ::ftruncate(descriptor_, static_cast<off_t>(bytes)) : -1;
  };
  if (again(cut) == -1) fail(files_->of(), "set the length of ", path_, " to ", format_bytes(bytes));
}

void File::sync() {
  // Not repeated after another failure: the second fsync would say that all is well.
  if (again([&] { return files_->allowed(Call::kSync, path_) ? ::fsync(descriptor_) : -1; }) == -1) {
    fail(files_->of(), "sync ", path_);
  }
}

void File::close() {
  if (locked_) return end();
  const int descriptor = std::exchange(descriptor_, -1);
  const bool allowed = files_->allowed(Call::kClose, path_);
  const int error = errno;
  const bool closed = ::close(descriptor) == 0 || errno == EINTR;
  if (!allowed) errno = error;
  if (!allowed || !closed) fail(files_->of(), "close ", path_);
}

std::string join(std::string_view folder, std::string_view name) {
  std::string path(folder);
  if (!path.empty() && path.back() != '/') path += '/';
  return path.append(name);
}

std::string parent_of(std::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const std::size_t slash = path.rfind('/');
  if (slash == std::string_view::npos) return ".";
  return std::string(path.substr(0, std::max<std::size_t>(slash, 1)));
}

}  // namespace roundpipe::files
