// Mutates the files of tests/corpus/checkpoint and reads them: each is read, or refused with an Error.
//
// Input number n of a reader is the same in every run. 5,000 of each, and more until ROUNDPIPE_FUZZ_SECONDS are over.
// To keep an input that has failed once, write it into the corpus: every file there is also read as it is.
// ROUNDPIPE_WRITE_CORPUS=1 makes the files that code makes anew.
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/error.h>
#include <roundpipe/files/crc32c.h>
#include <roundpipe/files/journal.h>
#include <roundpipe/files/manifest.h>
#include <roundpipe/files/run_folder.h>
#include <roundpipe/files/safetensors.h>

#include "faulty_files.h"

using namespace roundpipe;
using namespace roundpipe::files;
using namespace roundpipe::files::test;

namespace {

using Random = std::mt19937;

const std::string kCorpus = ROUNDPIPE_CORPUS;

std::string hexadecimal(const std::string& text) { return format_crc32c(crc32c(text.data(), text.size())); }

// -- the readers, what they promise of what they take, and checksums and lengths put right ----------------------------

struct Reader {
  std::string name;  // of its folder in the corpus
  std::function<void(const std::string& input)> read;
  std::function<std::string(std::string)> repair;
};

void read_safetensors(const std::string& input) {
  const auto file_bytes = static_cast<int64_t>(input.size());
  const SafetensorsHeader header = parse_safetensors_header(input, file_bytes, "input");
  std::vector<TensorDescription> tensors;
  int64_t bytes = 0;
  for (const TensorEntry& tensor : header.tensors) {
    REQUIRE(tensor.offset >= 8);
    REQUIRE(tensor.bytes >= 0);
    REQUIRE(tensor.bytes <= file_bytes - tensor.offset);
    bytes += tensor.bytes;
    tensors.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  const SafetensorsLayout layout = lay_out_safetensors(tensors, header.metadata);
  REQUIRE(layout.file_bytes == static_cast<int64_t>(layout.header.size()) + bytes);
}

// The length of the header in front: up to the last brace.
std::string repair_safetensors(std::string input) {
  const std::size_t brace = input.rfind('}');
  if (input.size() < 8 || brace == std::string::npos || brace < 8) return input;
  const std::size_t length = brace + 1 - 8;
  for (std::size_t byte = 0; byte < 8; ++byte) input[byte] = static_cast<char>(length >> (8 * byte) & 0xFF);
  return input;
}

void read_manifest_text(const std::string& input) {
  const Manifest manifest = parse_manifest(input, "input");
  for (const FileRecord& file : manifest.files) REQUIRE(is_file_name(file.name));
  const Manifest again = parse_manifest(print_manifest(manifest), "again");
  REQUIRE(again.files == manifest.files);
  REQUIRE(again.step == manifest.step);
}

std::string repair_manifest(std::string input) {
  constexpr std::string_view kField = ",\n  \"manifest_crc32c\": \"";
  const std::size_t field = input.rfind(kField);
  if (field == std::string::npos) return input;
  return input.substr(0, field) + std::string(kField) + hexadecimal(input.substr(0, field)) + "\"\n}\n";
}

void read_journal_file(const std::string& input) {
  static const TemporaryFolder folder(kMemory);
  write_file(folder / kJournalName, input);
  const JournalContents contents = read_journal(folder.path());
  REQUIRE(contents.whole_bytes <= static_cast<int64_t>(input.size()));
  write_file(folder / kJournalName, input.substr(0, static_cast<std::size_t>(contents.whole_bytes)));
  const JournalContents again = read_journal(folder.path());
  REQUIRE(again.records == contents.records);
  REQUIRE(again.notice.empty());
}

std::string repair_journal(std::string input) {
  std::string repaired;
  for (std::size_t at = 0; at < input.size();) {
    const std::size_t end = std::min(input.find('\n', at), input.size());
    const std::string line = input.substr(at, end - at);
    if (line.size() > 15) {
      const std::string body = line.substr(15);
      const std::string digits = std::to_string(body.size());
      const std::string summed = std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits + " " + body;
      repaired += hexadecimal(summed) + " " + summed;
    } else {
      repaired += line;
    }
    if (end < input.size()) repaired += '\n';
    at = end + 1;
  }
  return repaired;
}

const std::vector<Reader>& readers() {
  static const std::vector<Reader> all = {{"safetensors", read_safetensors, repair_safetensors},
                                          {"manifest", read_manifest_text, repair_manifest},
                                          {"journal", read_journal_file, repair_journal}};
  return all;
}

// -- the corpus -------------------------------------------------------------------------------------------------------

// What code makes of it: folder/name -> contents.
std::map<std::string, std::string> made_corpus() {
  std::map<std::string, std::string> made;
  const auto safetensors = [&](const std::string& name, const std::vector<TensorDescription>& tensors,
                               const SafetensorsMetadata& metadata = {}) {
    const SafetensorsLayout layout = lay_out_safetensors(tensors, metadata);
    std::string& file = made["safetensors/" + name];
    file = layout.header;
    file.resize(static_cast<std::size_t>(layout.file_bytes), '\x5A');
  };
  safetensors("empty", {});
  safetensors("one", {{"weight", "F32", {2, 3}}});
  safetensors("scalars", {{"a", "I64", {}}, {"b", "BOOL", {}}, {"c", "F16", {1}}, {"none", "F64", {0, 5}}});
  safetensors("small_elements", {{"a", "F4", {8}}, {"b", "F6_E2M3", {4}}, {"c", "F8_E4M3", {3}}}, {{"format", "pt"}});
  safetensors("names", {{"model.layers.0.\"quoted\"", "BF16", {4}}, {"\xC3\xA9\\\n", "U8", {7}}},
              {{"format", "pt"}, {"text", "\xE2\x82\xAC \t"}});
  made["safetensors/foreign_order"] = repair_safetensors(
      "........{ \"b\" : {\"shape\":[2],\"data_offsets\":[2,4],\"dtype\":\"U8\"}, "
      "\"a\":{\"dtype\":\"U8\",\"shape\":[2],"
      "\"data_offsets\":[0,2]} }1234");

  made["manifest/empty"] = print_manifest({});
  made["manifest/usual"] = print_manifest({.step = 1200,
                                           .files = {{"model-00001-of-00002.safetensors", 4'999'999'999, 0xDEADBEEF},
                                                     {"model-00002-of-00002.safetensors", 123, 1},
                                                     {"config.json", 0, 0}},
                                           .writer = {{"roundpipe", "0.1.0"}, {"torch", "2.13.0"}}});
  made["manifest/newer_minor"] = repair_manifest(
      "{\n  \"format\": \"roundpipe checkpoint\",\n  \"version\": \"1.9\",\n  \"step\": 5,\n  \"later\": [{\"a\": "
      "null}, 1.5e3, true],\n  \"writer\": {},\n  \"files\": [],\n  \"manifest_crc32c\": \"00000000\"\n}\n");

  const TemporaryFolder folder(kMemory);
  {
    RunFolder run(folder.path());
    const auto journal = run.open_journal(0);
    made["journal/empty"] = contents_of(folder / kJournalName);
    for (int64_t step = 1; step <= 4; ++step)
      journal->append(step, "{\"step\":" + std::to_string(step) + ",\"loss\":2.5}");
    made["journal/usual"] = contents_of(folder / kJournalName);
    journal->rewind(2);
    journal->append(3, "{\"data\":[1,2,{\"file\":\"a\"}],\"seeds\":{\"torch\":18446744073709551615}}");
    made["journal/rewound"] = contents_of(folder / kJournalName);
  }
  made["journal/torn"] = made["journal/usual"] + "01234567 00020 step 5 {\"lo";
  made["journal/newer_minor"] = made["journal/usual"] + repair_journal("........ ..... later thing\n");
  return made;
}

std::vector<std::string> kept_corpus(const std::string& reader) {
  std::vector<std::string> inputs;
  const std::string folder = join(kCorpus, reader);
  for (const std::string& name : FileSystem::real().list(folder)) inputs.push_back(contents_of(join(folder, name)));
  return inputs;
}

// -- mutation ---------------------------------------------------------------------------------------------------------

std::size_t below(Random& random, std::size_t limit) { return limit == 0 ? 0 : random() % limit; }

std::string mutated(Random& random, const std::vector<std::string>& corpus) {
  static const std::vector<std::string> kTokens = {"\"",
                                                   "{",
                                                   "}",
                                                   "[",
                                                   "]",
                                                   ":",
                                                   ",",
                                                   "0",
                                                   "-1",
                                                   "18446744073709551615",
                                                   "9223372036854775807",
                                                   "1e308",
                                                   "1e999",
                                                   "null",
                                                   "true",
                                                   "\\u0000",
                                                   "\\ud800",
                                                   "..",
                                                   "/",
                                                   "F32",
                                                   "F4",
                                                   "data_offsets",
                                                   "shape",
                                                   "__metadata__",
                                                   "\xFF",
                                                   "\n",
                                                   " ",
                                                   "[[[[[[[[[[[[[[[[[[[[",
                                                   "{\"a\":{\"a\":",
                                                   "rewind 0",
                                                   "step ",
                                                   "2.0",
                                                   std::string(300, '9'),
                                                   std::string(1, '\0')};
  std::string text = corpus[below(random, corpus.size())];
  for (std::size_t changes = 1 + below(random, 4); changes > 0; --changes) {
    const std::size_t at = below(random, text.size());
    const std::size_t length = std::min(1 + below(random, 1 + below(random, 40)), text.size() - at);
    switch (random() % 7) {
      case 0:
        if (!text.empty()) text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
        break;
      case 1:
        if (!text.empty()) text[at] = static_cast<char>(random());
        break;
      case 2:
        text.insert(at, kTokens[below(random, kTokens.size())]);
        break;
      case 3:
        text.replace(at, length, kTokens[below(random, kTokens.size())]);
        break;
      case 4:
        text.erase(at, length);
        break;
      case 5:
        text.insert(below(random, text.size()), text.substr(at, length));
        break;
      default: {
        const std::string& other = corpus[below(random, corpus.size())];
        text = text.substr(0, at) + other.substr(below(random, other.size()));
        break;
      }
    }
  }
  return text;
}

// Whether the reader took it.
bool taken(const Reader& reader, const std::string& input) {
  try {
    reader.read(input);
    return true;
  } catch (const Error& refused) {
    REQUIRE(std::string_view(refused.what()).starts_with("["));
    REQUIRE(std::string_view(refused.what()).size() < 1000);
    return false;
  }
}

int64_t peak_memory_bytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

}  // namespace

TEST_CASE("fuzz: the kept corpus is what code makes of it, and more") {
  for (const auto& [name, contents] : made_corpus()) {
    const std::string path = join(kCorpus, name);
    if (std::getenv("ROUNDPIPE_WRITE_CORPUS") != nullptr) {
      FileSystem::real().make_folders(parent_of(path));
      write_file(path, contents);
    }
    CAPTURE(name);
    CHECK(contents_of(path) == contents);
    for (const Reader& reader : readers()) {
      if (name.starts_with(reader.name + "/")) CHECK(taken(reader, contents));
    }
  }
}

TEST_CASE("fuzz: no input crashes or holds up a reader, or takes much memory") {
  const char* seconds = std::getenv("ROUNDPIPE_FUZZ_SECONDS");
  const double each_ms = (seconds == nullptr ? 0 : std::atof(seconds)) * 1000 / static_cast<double>(readers().size());
  const int64_t before_bytes = peak_memory_bytes();
  for (const Reader& reader : readers()) {
    const std::vector<std::string> corpus = kept_corpus(reader.name);
    REQUIRE(corpus.size() >= 3);
    for (const std::string& input : corpus) taken(reader, input);
    int64_t number = 0;
    int64_t takes = 0;
    CAPTURE(reader.name);
    for (const double until_ms = now_ms() + each_ms; number < 5000 || now_ms() < until_ms; ++number) {
      CAPTURE(number);
      Random random(static_cast<unsigned>(number));
      std::string input = mutated(random, corpus);
      if (random() % 4 != 0) input = reader.repair(std::move(input));
      takes += taken(reader, input) ? 1 : 0;
    }
    MESSAGE(reader.name << ": " << number << " inputs, " << takes << " of them taken");
  }
  CHECK(peak_memory_bytes() - before_bytes < 1'000'000'000);
}
