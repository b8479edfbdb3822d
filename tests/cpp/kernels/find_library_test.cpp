#include <dlfcn.h>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/kernels/card/find_library.h>

namespace roundpipe::kernels::card {

TEST_CASE("libraries: loaded ones, and those beside torch that nobody has loaded") {
  void* const loaded = find_library("libc10.so");
  REQUIRE(loaded != nullptr);
  int (*function)() = nullptr;
  CHECK_THROWS_WITH_AS(find_function(function, loaded, "no_such_function"),
                       doctest::Contains("a library of the card's vendor lacks no_such_function"), Error);
  CHECK(dlopen("libshm.so", RTLD_LAZY | RTLD_NOLOAD) == nullptr);
  CHECK(find_library("libshm.so") != nullptr);
  CHECK(find_library("libno_such_library.so") == nullptr);
}

TEST_CASE("libraries: versions by the names of files") {
  CHECK(major_of("libnvrtc.so.13", "libnvrtc.so") == 13);
  CHECK(major_of("libnvrtc.so.12.8.93", "libnvrtc.so") == 12);
  CHECK(major_of("libnvrtc.so", "libnvrtc.so") == 0);
  CHECK(major_of("libnvrtc.so.x", "libnvrtc.so") == -1);
  CHECK(major_of("libnvrtc-builtins.so.13.5", "libnvrtc.so") == -1);
  CHECK(major_of("libnvrtc.sox", "libnvrtc.so") == -1);
}

}  // namespace roundpipe::kernels::card
