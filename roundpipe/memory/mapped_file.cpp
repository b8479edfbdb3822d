#include <roundpipe/memory/mapped_file.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>

#include <ATen/ops/empty.h>

#include <roundpipe/core/error.h>

namespace roundpipe::memory {

namespace {

struct Mapping {
  void* data;
  size_t size_bytes;
};

void unmap(void* context) {
  const std::unique_ptr<Mapping> mapping(static_cast<Mapping*>(context));
  munmap(mapping->data, mapping->size_bytes);
}

std::invalid_argument cannot_map(const std::string& path, const char* reason) {
  return std::invalid_argument(
      concat("[memory] cannot map ", path, ": ", reason, "; expected a file with weights that this user may read"));
}

}  // namespace

at::Tensor map_file(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw cannot_map(path, std::strerror(errno));
  struct stat status{};
  const bool known = fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0;
  const auto size_bytes = static_cast<size_t>(status.st_size);
  // Writable, so that adapters can be merged; without reserved memory, because such writes are rare.
  void* const data =
      known ? mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, 0) : MAP_FAILED;
  const int error = errno;
  close(file);
  if (!known) throw cannot_map(path, "it is empty or no file");
  if (data == MAP_FAILED) throw cannot_map(path, std::strerror(error));
  c10::DataPtr pointer(data, new Mapping{data, size_bytes}, &unmap, c10::kCPU);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), size_bytes, std::move(pointer));
  return at::empty({0}, at::kByte).set_(storage, 0, {static_cast<int64_t>(size_bytes)}, {1});
}

bool is_mapped(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().data_ptr().get_deleter() == &unmap;
}

}  // namespace roundpipe::memory
