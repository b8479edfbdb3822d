#include <roundpipe/memory/mapped_file.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

using namespace roundpipe::memory;

namespace {

// A file of its own, removed with the test.
struct File {
  explicit File(const std::string& content) {
    std::string name = (std::filesystem::temp_directory_path() / "roundpipe_mapped_XXXXXX").string();
    const int descriptor = mkstemp(name.data());
    REQUIRE(descriptor >= 0);
    fclose(fdopen(descriptor, "w"));
    path = name;
    std::ofstream(path) << content;
  }
  ~File() { std::filesystem::remove(path); }
  std::string path;
};

std::string text(const at::Tensor& bytes) {
  return {bytes.const_data_ptr<uint8_t>(), bytes.const_data_ptr<uint8_t>() + bytes.numel()};
}

}  // namespace

TEST_CASE("mapped file: shows the file's bytes, and parts of it outlive the whole") {
  const File file("weights");
  at::Tensor part;
  {
    const at::Tensor whole = map_file(file.path);
    CHECK((whole.scalar_type() == at::kByte));
    CHECK(text(whole) == "weights");
    CHECK(is_mapped(whole));
    part = whole.narrow(0, 2, 3);
  }
  CHECK(is_mapped(part));
  CHECK(text(part) == "igh");
  CHECK_FALSE(is_mapped(part.clone()));
  CHECK_FALSE(is_mapped(at::ones({3})));
  CHECK_FALSE(is_mapped(at::empty({3}, at::kMeta)));
}

TEST_CASE("mapped file: writes stay in the process") {
  const File file("weights");
  const at::Tensor whole = map_file(file.path);
  whole.narrow(0, 0, 1).fill_('W');
  CHECK(text(whole) == "Weights");
  CHECK(text(map_file(file.path)) == "weights");
}

TEST_CASE("mapped file: a file that takes its place does not matter") {
  const File file("weights");
  const File other("another");
  const at::Tensor whole = map_file(file.path);
  std::filesystem::rename(other.path, file.path);
  CHECK(text(whole) == "weights");
}

TEST_CASE("mapped file: what cannot be mapped is named") {
  CHECK_THROWS_WITH_AS(map_file("/none/such"), doctest::Contains("[memory] cannot map /none/such: No such file"),
                       std::invalid_argument);
  const File empty("");
  CHECK_THROWS_WITH_AS(map_file(empty.path), doctest::Contains("it is empty or no file"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(map_file("/tmp"), doctest::Contains("it is empty or no file"), std::invalid_argument);
}
