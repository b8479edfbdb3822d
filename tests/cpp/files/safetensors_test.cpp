#include <roundpipe/files/safetensors.h>

#include <stdexcept>
#include <string>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>

#include "faulty_files.h"

using namespace roundpipe;
using namespace roundpipe::files;
using namespace roundpipe::files::test;

namespace {

std::string with_length(const std::string& header) {
  std::string length(8, '\0');
  for (std::size_t byte = 0; byte < 8; ++byte) length[byte] = static_cast<char>(header.size() >> (8 * byte));
  return length + header;
}

// What the reader says of a header, for a file with `data_bytes` behind it.
std::string refusal(const std::string& header, int64_t data_bytes) {
  const std::string start = with_length(header);
  return error_of<Error>(
      [&] { parse_safetensors_header(start, static_cast<int64_t>(start.size()) + data_bytes, "file"); });
}

}  // namespace

TEST_CASE("safetensors: what is laid out is parsed, and every tensor is aligned") {
  const std::vector<TensorDescription> tensors = {{"small", "U8", {3}},     {"weight \"é\"", "BF16", {5, 7}},
                                                  {"empty", "F32", {0, 4}}, {"scalar", "I64", {}},
                                                  {"other", "BF16", {2}},   {"halves", "F4", {6}}};
  const SafetensorsMetadata metadata = {{"format", "pt"}, {"note", "two\nlines"}};
  const SafetensorsLayout layout = lay_out_safetensors(tensors, metadata);
  CHECK(layout.header.size() % 8 == 0);
  const SafetensorsHeader header = parse_safetensors_header(layout.header, layout.file_bytes, "file");
  CHECK(header.metadata == metadata);
  REQUIRE(header.tensors.size() == tensors.size());
  std::vector<std::string> order;
  for (const TensorEntry& tensor : header.tensors) order.push_back(tensor.name);
  CHECK(order == std::vector<std::string>{"scalar", "empty", "weight \"é\"", "other", "small", "halves"});
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorEntry& entry = layout.tensors[i];
    CHECK(entry.name == tensors[i].name);
    CHECK(entry.shape == tensors[i].shape);
    CHECK(entry.offset * 8 % element_bits(entry.dtype) == 0);
    CHECK(std::find(header.tensors.begin(), header.tensors.end(), entry) != header.tensors.end());
  }
  CHECK(layout.tensors[1].bytes == 70);
  CHECK(layout.file_bytes == static_cast<int64_t>(layout.header.size()) + 8 + 70 + 4 + 3 + 3);
}

TEST_CASE("safetensors: a file without tensors, and one from disk") {
  const SafetensorsLayout empty = lay_out_safetensors({});
  CHECK(parse_safetensors_header(empty.header, empty.file_bytes, "file").tensors.empty());
  const TemporaryFolder folder;
  const SafetensorsLayout layout = lay_out_safetensors({{"a", "F32", {2}}});
  write_file(folder / "a.safetensors", layout.header + "12345678");
  CHECK(read_safetensors_header(folder / "a.safetensors").tensors == layout.tensors);
  write_file(folder / "cut.safetensors", layout.header + "1234567");
  CHECK(contains(error_of<Error>([&] { read_safetensors_header(folder / "cut.safetensors"); }),
                 "tensor 'a'] its bytes are"));
  write_file(folder / "short.safetensors", "12345");
  CHECK(contains(error_of<Error>([&] { read_safetensors_header(folder / "short.safetensors"); }),
                 "5 bytes, expected at least"));
  write_file(folder / "other.safetensors", "PK........");
  CHECK(
      contains(error_of<Error>([&] { read_safetensors_header(folder / "other.safetensors"); }), "no safetensors file"));
}

TEST_CASE("safetensors: tensors that the format cannot hold are refused before anything is written") {
  const auto refused = [](const std::vector<TensorDescription>& tensors) {
    return error_of<std::invalid_argument>([&] { lay_out_safetensors(tensors); });
  };
  CHECK(contains(refused({{"a", "F33", {1}}}), "tensor 'a': its dtype 'F33'"));
  CHECK(contains(refused({{"a", "F32", {1}}, {"a", "F32", {1}}}), "same name"));
  CHECK(contains(refused({{"__metadata__", "F32", {1}}}), "keeps this name"));
  CHECK(contains(refused({{"a", "F32", {2, -1}}}), "dimension -1"));
  CHECK(contains(refused({{"a", "U8", {1LL << 40, 1LL << 40}}}), "more elements"));
  CHECK(contains(refused({{"a", "F4", {3}}}), "end within a byte"));
  CHECK(contains(refused({{"\xFF", "F32", {1}}}), "not UTF-8"));
  CHECK(contains(refused({{std::string(100'000'000, 'x'), "F32", {1}}}), "several files"));
}

TEST_CASE("safetensors: headers that are not right are refused, and named") {
  const auto entry = [](const std::string& name, const std::string& dtype, const std::string& shape,
                        const std::string& offsets) {
    return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
  };
  const auto one = [&](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return refusal("{" + entry("a", dtype, shape, offsets) + "}", 8);
  };
  CHECK(one("F32", "[2]", "[0,8]") == "nothing was thrown");
  CHECK(contains(one("F32", "[2]", "[0,4]"), "its bytes are 0 to 4, expected 8"));
  CHECK(contains(one("F32", "[2]", "[8,0]"), "its bytes are 8 to 0, expected 8"));
  CHECK(contains(one("F32", "[2]", "[1,9]"), "expected to begin at 0"));
  CHECK(contains(one("F32", "[4]", "[0,16]"), "to be in the file"));
  CHECK(contains(one("F32", "[1]", "[0,4]"), "end at 4, expected at the file's end, 8"));
  CHECK(contains(one("F32", "[2]", "[0,8,9]"), "3 numbers"));
  CHECK(contains(one("F32", "[2]", "[0,8.0]"), "its second offset is 8.0"));
  CHECK(contains(one("F32", "[-2]", "[0,8]"), "a dimension of its shape is -2"));
  CHECK(contains(one("F32", "[2e400]", "[0,8]"), "not JSON"));
  CHECK(contains(one("F32", "[18446744073709551615]", "[0,8]"), "expected a whole number"));
  CHECK(contains(one("F32", "[4611686018427387904,4]", "[0,8]"), "more elements"));
  CHECK(contains(one("F32", "[0,4611686018427387904,4]", "[0,0]"), "more elements"));
  CHECK(contains(one("Q7", "[2]", "[0,8]"), "'Q7'"));
  CHECK(contains(one("F32", "2", "[0,8]"), "'shape' is of the type number, expected array"));
  CHECK(contains(refusal("{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8), "'data_offsets' is missing"));
  CHECK(contains(refusal("{\"a\":5}", 8), "'dtype' is missing"));
  CHECK(contains(refusal("{" + entry("a", "U8", "[8]", "[0,8]") + "," + entry("a", "U8", "[8]", "[0,8]") + "}", 8),
                 "'a' stands twice"));
  CHECK(contains(refusal("{" + entry("a", "U8", "[8]", "[0,8]") + "," + entry("b", "U8", "[8]", "[0,8]") + "}", 8),
                 "tensor 'b'] its bytes"));
  CHECK(contains(refusal("{\"__metadata__\":{\"a\":1}}", 0), "expected string"));
  CHECK(contains(refusal("{\"__metadata__\":7}", 0), "no object"));
  CHECK(contains(refusal("[]", 0), "does not begin with '{'"));
  CHECK(contains(refusal("", 0), "does not begin with '{'"));
  CHECK(contains(refusal("{} x", 0), "not JSON"));
  CHECK(contains(refusal("{\"\xFF\":1}", 0), "not JSON"));
  CHECK(contains(refusal("{\"a\":" + std::string(1'000'000, '['), 0), "more than 16 levels"));
  std::string many = "{\"a\":[0";
  for (int i = 0; i < 4'000'000; ++i) many += ",0";
  CHECK(contains(refusal(many + "]}", 0), "more than 4000000 values"));
  const std::string huge("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}", 10);
  CHECK(contains(error_of<Error>([&] { parse_safetensors_header(huge, 10, "file"); }), "18446744073709551615 bytes"));
  CHECK(contains(error_of<Error>([&] { parse_safetensors_header(with_length("{}").substr(0, 9), 100, "file"); }),
                 "read more"));
}
