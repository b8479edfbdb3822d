#include <roundpipe/files/manifest.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <optional>
#include <set>
#include <stdexcept>

#include <roundpipe/core/error.h>
#include <roundpipe/files/crc32c.h>

#include "json_text.h"

namespace roundpipe::files {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kFormatName = "roundpipe checkpoint";
// A hundred bytes are a file's.
constexpr int64_t kMostManifest_bytes = 16 << 20;
constexpr JsonLimits kLimits{.depth = 16, .values = 1'000'000};
// The text ends with this, the checksum of all before it, and kEnd.
constexpr std::string_view kChecksum = ",\n  \"manifest_crc32c\": \"";
constexpr std::string_view kEnd = "\"\n}\n";
constexpr std::size_t kDigits = 8;

std::optional<uint32_t> parse_crc32c(std::string_view digits) {
  if (digits.size() != kDigits || digits.find_first_not_of("0123456789abcdef") != std::string_view::npos) return {};
  uint32_t value = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  return value;
}

// "1.0" -> 1
std::optional<int64_t> major_of(std::string_view version) {
  int64_t major = -1;
  const auto [end, error] = std::from_chars(version.data(), version.data() + version.size(), major);
  if (error != std::errc{} || major < 0 || end == version.data() + version.size() || *end != '.') return {};
  return major;
}

bool ends_with_own_checksum(std::string_view text) {
  const std::size_t tail = kChecksum.size() + kDigits + kEnd.size();
  if (text.size() >= tail && text.ends_with(kEnd)) {
    const std::string_view before = text.substr(0, text.size() - tail);
    const std::string_view digits = text.substr(text.size() - kEnd.size() - kDigits, kDigits);
    return text.substr(before.size(), kChecksum.size()) == kChecksum &&
           digits == format_crc32c(crc32c(before.data(), before.size()));
  }
  return false;
}

// Another major version may sum otherwise, so its number is told first.
void check_version(int64_t major, const std::string& version, bool is_summed, const std::string& where) {
  if (major != kFormatMajor && major != kNodesFormatMajor) {
    throw Error(concat("[", where, "] the checkpoint has format ", shown(version), ", expected ", kFormatMajor,
                       ".x or ", kNodesFormatMajor,
                       ".x, which this version of roundpipe reads; use the version that wrote it",
                       major > kNodesFormatMajor ? ", or a newer one" : "",
                       is_summed ? "" : ", unless the file is damaged: its checksum is not at its end"));
  }
  if (is_summed) return;
  throw Error(concat("[", where,
                     "] the text does not end with its own checksum; it is damaged, or was edited: use another "
                     "checkpoint"));
}

FileRecord parse_file(const json& fields, const std::string& where) {
  FileRecord record;
  record.name = member(fields, "name", json::value_t::string, where).get<std::string>();
  if (!is_file_name(record.name)) {
    throw Error(concat("[", where, "] a file is called '", shown(record.name),
                       "', expected a plain name that stays in the folder; do not use this checkpoint"));
  }
  const std::string of = concat(where, ", file '", record.name, "'");
  record.bytes = count(member(fields, "bytes", of), "'bytes'", of);
  const auto checksum = parse_crc32c(member(fields, "crc32c", json::value_t::string, of).get_ref<const std::string&>());
  if (!checksum) throw Error(concat("[", of, "] 'crc32c' is not eight hexadecimal digits; the file is damaged"));
  record.crc32c = *checksum;
  return record;
}

}  // namespace

const FileRecord* Manifest::find(std::string_view name) const {
  const auto found =
      std::find_if(files.begin(), files.end(), [&](const FileRecord& file) { return file.name == name; });
  return found == files.end() ? nullptr : &*found;
}

bool is_file_name(std::string_view name) {
  const auto is_plain = [](char letter) { return letter >= ' ' && letter <= '~' && letter != '/' && letter != '\\'; };
  return !name.empty() && name.size() <= 255 && name.front() != '.' && name != kManifestName &&
         std::all_of(name.begin(), name.end(), is_plain);
}

std::string format_crc32c(uint32_t crc32c) {
  std::array<char, kDigits + 1> digits{};
  std::snprintf(digits.data(), digits.size(), "%08x", crc32c);
  return digits.data();
}

std::string print_manifest(const Manifest& manifest) {
  const auto most_nodes = std::max<int64_t>(1, static_cast<int64_t>(manifest.files.size()));
  if (manifest.step < 0 || manifest.nodes < 1 || manifest.nodes > most_nodes) {
    throw std::invalid_argument(concat("[manifest] the step is ", manifest.step, " of ", manifest.nodes, " nodes with ",
                                       manifest.files.size(),
                                       " files, expected 0 or more of at least 1, each with a file of its own"));
  }
  std::set<std::string_view> names;
  ordered_json files = ordered_json::array();
  for (const FileRecord& file : manifest.files) {
    if (!is_file_name(file.name) || file.bytes < 0 || !names.insert(file.name).second) {
      throw std::invalid_argument(concat("[manifest] a file is called '", shown(file.name), "' and has ", file.bytes,
                                         " bytes, expected a plain name, once, and 0 bytes or more; rename it"));
    }
    files.push_back({{"name", file.name}, {"bytes", file.bytes}, {"crc32c", format_crc32c(file.crc32c)}});
  }
  const bool several = manifest.nodes > 1;
  ordered_json fields = {{"format", kFormatName},
                         {"version", concat(several ? kNodesFormatMajor : kFormatMajor, ".", kFormatMinor)},
                         {"step", manifest.step},
                         {"writer", ordered_json(manifest.writer)}};
  if (several) fields["nodes"] = manifest.nodes;
  fields["files"] = std::move(files);
  std::string text = print_json(fields, "manifest");
  text.resize(text.size() - 2);  // "\n}"
  const uint32_t checksum = crc32c(text.data(), text.size());
  text.append(kChecksum).append(format_crc32c(checksum)).append(kEnd);
  return text;
}

Manifest parse_manifest(std::string_view text, const std::string& where) {
  const json fields = parse_json(text, where, kLimits);
  const std::string& name = member(fields, "format", json::value_t::string, where).get_ref<const std::string&>();
  const std::string& version = member(fields, "version", json::value_t::string, where).get_ref<const std::string&>();
  const std::optional<int64_t> major = major_of(version);
  if (name != kFormatName || !major) {
    throw Error(concat("[", where, "] the format is '", shown(name), "', version '", shown(version), "', expected '",
                       kFormatName, "', version ", kFormatMajor, "; it is no manifest of a checkpoint, or damaged"));
  }
  check_version(*major, version, ends_with_own_checksum(text), where);
  Manifest manifest;
  manifest.format = version;
  manifest.step = count(member(fields, "step", where), "'step'", where);
  if (*major == kNodesFormatMajor) {
    manifest.nodes = count(member(fields, "nodes", where), "'nodes'", where);
    if (manifest.nodes < 2) throw Error(concat("[", where, "] 'nodes' is not 2 or more; the file is damaged"));
  }
  const json& writer = member(fields, "writer", json::value_t::object, where);
  for (const auto& [key, value] : writer.items()) {
    manifest.writer[key] = member(writer, key.c_str(), json::value_t::string, where).get<std::string>();
  }
  std::set<std::string> names;
  for (const json& file : member(fields, "files", json::value_t::array, where)) {
    manifest.files.push_back(parse_file(file, where));
    if (!names.insert(manifest.files.back().name).second) {
      throw Error(concat("[", where, "] '", manifest.files.back().name, "' is listed twice; the file is damaged"));
    }
  }
  if (manifest.nodes > std::max<int64_t>(1, static_cast<int64_t>(manifest.files.size()))) {
    throw Error(concat("[", where, "] 'nodes' is ", manifest.nodes, " and there are ", manifest.files.size(),
                       " files, expected at least one of each node; the file is damaged"));
  }
  return manifest;
}

Manifest read_manifest(const std::string& folder, FileSystem& files) {
  const std::string path = join(folder, kManifestName);
  return parse_manifest(files.read_small(path, kMostManifest_bytes), path);
}

}  // namespace roundpipe::files
