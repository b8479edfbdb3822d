#include <roundpipe/saving/tensor_files.h>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/files/run_folder.h>
#include <roundpipe/files/steps.h>

#include "faulty_files.h"

using namespace roundpipe::saving;
namespace files = roundpipe::files;

namespace {

// Writes the tensors as the checkpoint of step 1.
files::FileRecord save(const std::string& folder, const std::vector<Destination>& tensors) {
  files::RunFolder run(folder);
  const auto layout = lay_out(tensors);
  const auto writer = run.begin(1);
  files::OutputFile& file = writer->create("model.safetensors", layout.file_bytes);
  file.write_at(0, layout.header.data(), static_cast<int64_t>(layout.header.size()));
  for (size_t i = 0; i < tensors.size(); ++i) write_tensor({&file, layout.tensors[i].offset}, tensors[i].second);
  return writer->commit().files.front();
}

void ignore(int64_t) {}

}  // namespace

TEST_CASE("tensor files: what is written comes back, whatever the strides, cast where dtypes differ") {
  const files::test::TemporaryFolder folder(files::test::kMemory);
  const at::Tensor dense = at::randn({3, 5});
  const at::Tensor turned = at::randn({4, 6}).t();
  const at::Tensor half = at::randn({7}).to(at::kBFloat16);
  const at::Tensor none = at::empty({0, 3});
  const auto record = save(folder.path(), {{"dense", dense}, {"turned", turned}, {"half", half}, {"none", none}});
  const at::Tensor a = at::empty({3, 5}), b = at::empty({4, 6}).t(), c = at::empty({7}), d = at::empty({0, 3});
  int64_t seen = 0;
  read_tensors(folder / "step-1", record, {{"dense", a}, {"turned", b}, {"half", c}, {"none", d}},
               [&](int64_t bytes) { seen += bytes; });
  CHECK(a.equal(dense));
  CHECK(b.equal(turned));
  CHECK(c.equal(half.to(at::kFloat)));
  CHECK(seen == record.bytes);
}

TEST_CASE("tensor files: another shape, another name and damage are refused") {
  const files::test::TemporaryFolder folder(files::test::kMemory);
  const at::Tensor value = at::ones({64});
  const auto record = save(folder.path(), {{"value", value}});
  const std::string step = folder / "step-1";
  const at::Tensor other = at::zeros({63}), same = at::zeros({64});
  CHECK_THROWS_AS(read_tensors(step, record, {{"value", other}}, ignore), std::invalid_argument);
  CHECK_THROWS_AS(read_tensors(step, record, {{"values", same}}, ignore), roundpipe::Error);
  CHECK(same.sum().item<float>() == 0);
  {
    std::fstream file(files::join(step, "model.safetensors"), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(record.bytes - 1);
    file.put('\x41');
  }
  CHECK_THROWS_AS(read_tensors(step, record, {}, ignore), roundpipe::Error);
  CHECK_THROWS_AS(read_tensors(step, record, {{"value", same}}, ignore), roundpipe::Error);
}

TEST_CASE("tensor files: ranges of elements come back, cast where dtypes differ") {
  const files::test::TemporaryFolder folder(files::test::kMemory);
  const at::Tensor numbers = at::arange(24, at::kFloat).view({4, 6});
  const at::Tensor half = at::arange(9).to(at::kBFloat16);
  const auto record = save(folder.path(), {{"numbers", numbers}, {"half", half}});
  const std::string step = folder / "step-1";
  const at::Tensor a = at::empty({5}), b = at::empty({3}), c = at::empty({2}), none = at::empty({0});
  read_ranges(step, record, {{"numbers", 4, a}, {"half", 6, b}, {"numbers", 22, c}, {"half", 9, none}});
  CHECK(a.equal(at::arange(4, 9, at::kFloat)));
  CHECK(b.equal(at::arange(6, 9, at::kFloat)));
  CHECK(c.equal(at::arange(22, 24, at::kFloat)));
  a.zero_();
  CHECK_THROWS_AS(read_ranges(step, record, {{"numbers", 0, a}, {"numbers", 23, c}}), roundpipe::Error);
  CHECK_THROWS_AS(read_ranges(step, record, {{"numbers", 0, a}, {"other", 0, c}}), roundpipe::Error);
  CHECK_THROWS_AS(read_ranges(step, record, {{"numbers", -1, a}}), roundpipe::Error);
  CHECK(a.equal(at::zeros({5})));
}

TEST_CASE("tensor files: tensors are cut into files of at most so many bytes") {
  using Counts = std::vector<size_t>;
  CHECK(shard_counts({}, 10) == Counts{0});
  CHECK(shard_counts({4, 6, 1, 20, 3}, 10) == Counts{2, 1, 1, 1});
  CHECK(shard_counts({20, 3}, 10) == Counts{1, 1});
  CHECK(shard_name("model", 0, 1) == "model.safetensors");
  CHECK(shard_name("model", 1, 12) == "model-00002-of-00012.safetensors");
}

TEST_CASE("tensor files: a dtype without a name is refused") {
  CHECK_THROWS_AS(dtype_name(at::kComplexDouble, "'w'"), std::invalid_argument);
}
