#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <link.h>

#include <string>

// Of every test program.
TEST_CASE("no Python is in the process") {
  std::string loaded;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* names) {
        const std::string path = info->dlpi_name;
        *static_cast<std::string*>(names) += path.substr(path.rfind('/') + 1) + "\n";
        return 0;
      },
      &loaded);
  CAPTURE(loaded);
  CHECK(loaded.find("libc.so") != std::string::npos);
  CHECK(loaded.find("python") == std::string::npos);
}
