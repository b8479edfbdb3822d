#include <roundpipe/files/manifest.h>

#include <stdexcept>
#include <string>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/files/crc32c.h>

#include "faulty_files.h"

using namespace roundpipe;
using namespace roundpipe::files;
using namespace roundpipe::files::test;

namespace {

Manifest example() {
  return {.step = 120,
          .files = {{"model-00001.safetensors", 1234567890123, 0x00ABCDEF}, {"state.json", 0, 0}},
          .writer = {{"roundpipe", "0.1.0"}, {"torch", "2.13.0"}}};
}

// With its own checksum at the end, whatever it is.
std::string signed_text(const std::string& text) {
  return text + ",\n  \"manifest_crc32c\": \"" + format_crc32c(crc32c(text.data(), text.size())) + "\"\n}\n";
}

std::string refusal(const std::string& text) {
  return error_of<Error>([&] { parse_manifest(text, "manifest.json"); });
}

constexpr const char* kHead = "{\n  \"format\": \"roundpipe checkpoint\",\n  \"version\": \"1.7\",\n  \"step\": 3";

}  // namespace

TEST_CASE("manifest: what is printed is parsed") {
  const Manifest manifest = example();
  const std::string text = print_manifest(manifest);
  const Manifest parsed = parse_manifest(text, "manifest.json");
  CHECK(parsed.step == 120);
  CHECK(parsed.files == manifest.files);
  CHECK(parsed.writer == manifest.writer);
  CHECK(parsed.format == "1.0");
  CHECK(parsed.find("state.json") == &parsed.files[1]);
  CHECK(parsed.find("other") == nullptr);
  CHECK(contains(text, "\"crc32c\": \"00abcdef\""));
}

TEST_CASE("manifest: that of several nodes is of another major version, which older readers refuse") {
  Manifest manifest = example();
  CHECK(contains(print_manifest(manifest), "\"version\": \"1.0\""));
  manifest.nodes = 3;
  CHECK_THROWS_AS(print_manifest(manifest), std::invalid_argument);  // each has a file of its own
  manifest.files.push_back({"rank-00002-state.json", 0, 0});
  const Manifest parsed = parse_manifest(print_manifest(manifest), "manifest.json");
  CHECK(parsed.format == "2.0");
  CHECK(parsed.nodes == 3);
  CHECK(parsed.files == manifest.files);
  manifest.nodes = 0;
  CHECK_THROWS_AS(print_manifest(manifest), std::invalid_argument);
  const std::string head = "{\"format\":\"roundpipe checkpoint\",\"version\":\"2.0\",\"step\":1";
  CHECK(contains(refusal(signed_text(head + ",\"writer\":{},\"files\":[]")), "'nodes' is missing"));
  CHECK(contains(refusal(signed_text(head + ",\"nodes\":1,\"writer\":{},\"files\":[]")), "'nodes' is not 2 or more"));
  for (const char* const nodes : {"2", "2000000", "1099511627776", "9223372036854775807"}) {
    CHECK(contains(refusal(signed_text(head + ",\"nodes\":" + nodes + ",\"writer\":{},\"files\":[]")),
                   std::string("'nodes' is ") + nodes + " and there are 0 files"));
  }
}

TEST_CASE("manifest: each flipped bit and each cut is refused") {
  const std::string text = print_manifest(example());
  for (std::size_t at = 0; at < text.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = text;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << bit));
      CAPTURE(flipped);
      REQUIRE(contains(refusal(flipped), "[manifest.json"));
    }
    REQUIRE(contains(refusal(text.substr(0, at)), "[manifest.json"));
  }
}

TEST_CASE("manifest: names stay in the folder") {
  for (const std::string& name :
       std::vector<std::string>{"a", "model-00001-of-00002.safetensors", "a b", "a..b", "~"}) {
    CHECK(is_file_name(name));
  }
  for (const std::string& name :
       std::vector<std::string>{"", ".", "..", "../a", "/a", "a/b", "a\\b", ".hidden", std::string("a\0b", 3), "a\n",
                                "\xC3\xA9", "manifest.json", std::string(256, 'a')}) {
    CHECK_FALSE(is_file_name(name));
    CHECK_THROWS_AS(print_manifest({.files = {{name, 1, 0}}}), std::invalid_argument);
  }
  CHECK_THROWS_AS(print_manifest({.files = {{"a", 1, 0}, {"a", 1, 0}}}), std::invalid_argument);
  CHECK_THROWS_AS(print_manifest({.files = {{"a", -1, 0}}}), std::invalid_argument);
  CHECK_THROWS_AS(print_manifest({.step = -1}), std::invalid_argument);
  CHECK_THROWS_AS(print_manifest({.writer = {{"a", "\xFF"}}}), std::invalid_argument);
  const std::string file = signed_text(
      std::string(kHead) + ",\"writer\":{},\"files\":[{\"name\":\"../a\",\"bytes\":1,\"crc32c\":\"00000000\"}]");
  CHECK(contains(refusal(file), "a file is called '../a'"));
}

TEST_CASE("manifest: newer minor versions are read, another major one is refused by number") {
  const std::string newer = signed_text(std::string(kHead) +
                                        ",\"new\":{\"x\":[1,2]},\"writer\":{},\"files\":[{\"name\":\"a\",\"bytes\":1,"
                                        "\"crc32c\":\"0000000a\",\"more\":1}]");
  const Manifest parsed = parse_manifest(newer, "manifest.json");
  CHECK(parsed.format == "1.7");
  CHECK(parsed.files == std::vector<FileRecord>{{"a", 1, 10}});
  const auto of_version = [](const std::string& version) {
    return refusal("{\"format\":\"roundpipe checkpoint\",\"version\":\"" + version + "\"}");
  };
  CHECK(contains(of_version("3.0"), "has format 3.0, expected 1.x or 2.x"));
  CHECK(contains(of_version("3.0"), "or a newer one, unless the file is damaged"));
  const std::string whole = refusal(signed_text("{\"format\":\"roundpipe checkpoint\",\"version\":\"3.0\""));
  CHECK(contains(whole, "or a newer one"));
  CHECK_FALSE(contains(whole, "damaged"));
  CHECK_FALSE(contains(of_version("0.9"), "or a newer one"));
  CHECK(contains(of_version("1"), "no manifest of a checkpoint"));
  CHECK(contains(of_version("x.1"), "no manifest of a checkpoint"));
  CHECK(contains(of_version("-1.1"), "no manifest of a checkpoint"));
  CHECK(contains(refusal("{\"format\":\"other\",\"version\":\"1.0\"}"), "the format is 'other'"));
  CHECK(contains(refusal("{}"), "'format' is missing"));
}

TEST_CASE("manifest: fields that are not right are refused") {
  const auto with = [](const std::string& rest) { return refusal(signed_text(kHead + rest)); };
  CHECK(with(",\"writer\":{},\"files\":[]") == "nothing was thrown");
  CHECK(contains(with(",\"files\":[]"), "'writer' is missing"));
  CHECK(contains(with(",\"writer\":{\"a\":1},\"files\":[]"), "expected string"));
  CHECK(contains(with(",\"writer\":{},\"files\":{}"), "expected array"));
  CHECK(contains(with(",\"step\":4,\"writer\":{},\"files\":[]"), "'step' stands twice"));
  const auto file = [&](const std::string& fields) {
    return with(",\"writer\":{},\"files\":[{\"name\":\"a\"" + fields + "}]");
  };
  CHECK(contains(file(",\"bytes\":-1,\"crc32c\":\"00000000\""), "'bytes' is -1"));
  CHECK(contains(file(",\"bytes\":1.5,\"crc32c\":\"00000000\""), "'bytes' is 1.5"));
  CHECK(contains(file(",\"bytes\":1,\"crc32c\":\"0000000G\""), "eight hexadecimal digits"));
  CHECK(contains(file(",\"bytes\":1,\"crc32c\":\"0\""), "eight hexadecimal digits"));
  CHECK(contains(file(",\"bytes\":1,\"crc32c\":\"00000000\"},{\"name\":\"a\",\"bytes\":1,\"crc32c\":\"00000000\""),
                 "listed twice"));
}
