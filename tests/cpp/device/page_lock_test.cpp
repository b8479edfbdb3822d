#include <roundpipe/device/accelerator/page_lock.h>

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include <ATen/DeviceAccelerator.h>

using roundpipe::device::find_page_locker;

namespace {
int last_error = 0;
}

// A runtime with the functions of vendors' runtimes. It locks pages by system calls, since sanitizers disable the
// library's functions.
extern "C" {
__attribute__((visibility("default"))) int rptestHostRegister(void* data, size_t size_bytes, unsigned int flags) {
  return last_error = flags == 1 && syscall(SYS_mlock, data, size_bytes) == 0 ? 0 : 2;
}
// Like vendors' functions, this one gets only the first byte; the test locks one page.
__attribute__((visibility("default"))) int rptestHostUnregister(void* data) {
  return last_error = syscall(SYS_munlock, data, 4096) == 0 ? 0 : 2;
}
__attribute__((visibility("default"))) int rptestGetLastError() {
  const int error = last_error;
  last_error = 0;
  return error;
}
}

TEST_CASE("page locker: found by name among what is loaded, and it locks") {
  const auto locker = find_page_locker("rptest", {"libnotloaded.so"});
  REQUIRE(locker);
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(page != MAP_FAILED);
  CHECK(locker->lock(page, 4096));
  CHECK(last_error == 0);
  unsigned char present = 0;
  REQUIRE(mincore(page, 4096, &present) == 0);
  CHECK((present & 1) == 1);  // though no code has touched it
  locker->unlock(page, 4096);
  munmap(page, 4096);
}

TEST_CASE("page locker: a refusal is reported once, and not left for whoever asks the runtime next") {
  const auto locker = find_page_locker("rptest", {});
  REQUIRE(locker);
  CHECK_FALSE(locker->lock(nullptr, 4096));
  CHECK(last_error == 0);
  locker->unlock(reinterpret_cast<void*>(1), 4096);
  CHECK(last_error == 0);
}

TEST_CASE("page locker: none where functions are missing, nothing is loaded to find them") {
  CHECK_FALSE(find_page_locker("nosuchruntime", {"libnotloaded.so"}));
  CHECK_FALSE(find_page_locker("rptestmissing", {}));
  // Part of the system, but not of this program; looking for symbols in it must not load it.
  CHECK_FALSE(find_page_locker("nosuchruntime", {"libBrokenLocale.so.1"}));
  CHECK(dlopen("libBrokenLocale.so.1", RTLD_LAZY | RTLD_NOLOAD) == nullptr);
}

TEST_CASE("page locker: of torch's runtime, where torch has such an accelerator") {
  const auto type = at::accelerator::getAccelerator(false);
  const bool expected = type && (*type == c10::DeviceType::CUDA || *type == c10::DeviceType::HIP);
  CHECK((roundpipe::device::runtime_page_locker() != nullptr) == expected);
}
