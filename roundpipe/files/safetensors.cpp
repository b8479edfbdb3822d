#include <roundpipe/files/safetensors.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>

#include "json_text.h"

namespace roundpipe::files {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr int64_t kLength_bytes = 8;  // of the header's length, in front of it
constexpr const char* kMetadata = "__metadata__";
constexpr std::size_t kMostDimensions = 64;  // that torch takes

constexpr std::array<std::pair<std::string_view, int>, 22> kDtypes{
    {{"BOOL", 8},    {"U8", 8},      {"I8", 8},          {"I16", 16},       {"U16", 16},    {"F16", 16},
     {"BF16", 16},   {"I32", 32},    {"U32", 32},        {"F32", 32},       {"I64", 64},    {"U64", 64},
     {"F64", 64},    {"C64", 64},    {"F8_E4M3", 8},     {"F8_E5M2", 8},    {"F8_E8M0", 8}, {"F4", 4},
     {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}}};

// What is wrong with a tensor, or its bytes.
struct Size {
  std::string problem;
  int64_t bytes = 0;
};

Size size_of(const std::string& dtype, const std::vector<int64_t>& shape) {
  const int bits = element_bits(dtype);
  if (bits == 0) return {concat("its dtype '", shown(dtype), "' is none of the format's")};
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 64;
  int64_t elements = 1;
  bool empty = false;
  for (const int64_t dimension : shape) {
    if (dimension < 0) return {concat("its shape has the dimension ", dimension)};
    if (dimension == 0) {
      empty = true;
    } else if (elements > kMost / dimension) {
      return {"its shape has more elements than a file can hold"};
    } else {
      elements *= dimension;
    }
  }
  if (empty) return {};
  if (elements * bits % 8 != 0) return {concat(elements, " elements of ", bits, " bits end within a byte")};
  return {{}, elements * bits / 8};
}

std::string little_endian(uint64_t value) {
  std::string out;
  for (int byte = 0; byte < kLength_bytes; ++byte) out += static_cast<char>(value >> (8 * byte) & 0xFF);
  return out;
}

uint64_t from_little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (int byte = 0; byte < kLength_bytes; ++byte) {
    value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[static_cast<std::size_t>(byte)])) << (8 * byte);
  }
  return value;
}

// The header's length without its eight bytes in front, checked against the file.
int64_t header_bytes(std::string_view start, int64_t file_bytes, const std::string& where) {
  if (file_bytes < kLength_bytes || start.size() < kLength_bytes) {
    throw Error(concat("[", where, "] the file has ", file_bytes,
                       " bytes, expected at least the 8 of a safetensors header's length; it is cut off, or another "
                       "kind of file"));
  }
  const uint64_t length = from_little_endian(start);
  if (length > static_cast<uint64_t>(std::min(kMostSafetensorsHeader_bytes, file_bytes - kLength_bytes))) {
    throw Error(concat("[", where, "] the header says that it has ", length, " bytes, of a file of ", file_bytes,
                       " bytes, expected at most those and at most ", kMostSafetensorsHeader_bytes,
                       "; it is cut off, damaged, or no safetensors file"));
  }
  return static_cast<int64_t>(length);
}

TensorEntry parse_tensor(const std::string& name, const json& fields, const std::string& where) {
  const std::string of = concat(where, ", tensor '", shown(name), "'");
  TensorEntry entry;
  entry.name = name;
  entry.dtype = member(fields, "dtype", json::value_t::string, of).get<std::string>();
  const json& shape = member(fields, "shape", json::value_t::array, of);
  if (shape.size() > kMostDimensions) {
    throw Error(concat("[", of, "] its shape has ", shape.size(), " dimensions, expected at most ", kMostDimensions,
                       "; the file is damaged"));
  }
  for (const json& dimension : shape) entry.shape.push_back(count(dimension, "a dimension of its shape", of));
  const json& offsets = member(fields, "data_offsets", json::value_t::array, of);
  if (offsets.size() != 2) {
    throw Error(concat("[", of, "] 'data_offsets' has ", offsets.size(), " numbers, expected 2; the file is damaged"));
  }
  const int64_t begin = count(offsets[0], "its first offset", of);
  const int64_t end = count(offsets[1], "its second offset", of);
  const auto [problem, bytes] = size_of(entry.dtype, entry.shape);
  if (!problem.empty()) throw Error(concat("[", of, "] ", problem, "; the file is damaged, or newer than this reader"));
  if (end < begin || end - begin != bytes) {
    throw Error(concat("[", of, "] its bytes are ", begin, " to ", end, ", expected ", bytes,
                       " by its dtype and shape; the file is damaged"));
  }
  entry.offset = begin;  // of the data, until all are known to lie in it
  entry.bytes = bytes;
  return entry;
}

}  // namespace

int element_bits(std::string_view dtype) {
  for (const auto& [name, bits] : kDtypes) {
    if (name == dtype) return bits;
  }
  return 0;
}

SafetensorsLayout lay_out_safetensors(const std::vector<TensorDescription>& tensors,
                                      const SafetensorsMetadata& metadata) {
  SafetensorsLayout layout;
  std::set<std::string_view> names;
  int64_t data_bytes = 0;
  for (const TensorDescription& tensor : tensors) {
    auto [problem, bytes] = size_of(tensor.dtype, tensor.shape);
    if (tensor.name == kMetadata) problem = "the format keeps this name for its texts";
    if (!names.insert(tensor.name).second) problem = "another tensor has the same name";
    if (bytes > std::numeric_limits<int64_t>::max() / 2 - data_bytes) problem = "all together are too large for a file";
    if (!problem.empty()) {
      throw std::invalid_argument(concat("[safetensors] tensor '", shown(tensor.name), "': ", problem,
                                         "; expected tensors that the format can hold"));
    }
    data_bytes += bytes;
    layout.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, 0, bytes});
  }
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  // Elements of 6 and 4 bits come last.
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return element_bits(tensors[a].dtype) > element_bits(tensors[b].dtype);
  });

  ordered_json fields = ordered_json::object();
  if (!metadata.empty()) fields[kMetadata] = metadata;
  int64_t offset = 0;
  std::string text;
  // Entry by entry: looking names up in an ordered object takes time that grows with their number.
  for (const std::size_t index : order) {
    TensorEntry& entry = layout.tensors[index];
    entry.offset = offset;
    offset += entry.bytes;
    text += text.empty() && metadata.empty() ? "" : ",";
    text += print_json(entry.name, "safetensors", true) + ":" +
            print_json(ordered_json{{"dtype", entry.dtype},
                                    {"shape", entry.shape},
                                    {"data_offsets", {entry.offset, entry.offset + entry.bytes}}},
                       "safetensors", true);
  }
  layout.header = print_json(fields, "safetensors", true);
  layout.header.insert(layout.header.size() - 1, text);
  layout.header.resize(static_cast<std::size_t>(align_up(static_cast<int64_t>(layout.header.size()), 8)), ' ');
  if (layout.header.size() > static_cast<std::size_t>(kMostSafetensorsHeader_bytes)) {
    throw std::invalid_argument(concat("[safetensors] the header has ", layout.header.size(),
                                       " bytes, expected at most ", kMostSafetensorsHeader_bytes,
                                       "; put the tensors into several files"));
  }
  layout.header.insert(0, little_endian(layout.header.size()));
  const auto data_start = static_cast<int64_t>(layout.header.size());
  for (TensorEntry& entry : layout.tensors) entry.offset += data_start;
  layout.file_bytes = data_start + data_bytes;
  return layout;
}

SafetensorsHeader parse_safetensors_header(std::string_view start, int64_t file_bytes, const std::string& where) {
  const int64_t length = header_bytes(start, file_bytes, where);
  if (static_cast<int64_t>(start.size()) - kLength_bytes < length) {
    throw Error(concat("[", where, "] ", start.size(), " bytes of the file are here, expected its header of ", length,
                       " bytes behind the first 8; read more of it"));
  }
  const std::string_view text = start.substr(kLength_bytes, static_cast<std::size_t>(length));
  if (text.empty() || text.front() != '{') {
    throw Error(
        concat("[", where, "] the header does not begin with '{'; the file is damaged, or no safetensors file"));
  }
  const json fields = parse_json(text, where);
  const int64_t data_start = kLength_bytes + length;
  SafetensorsHeader header;
  for (const auto& [name, value] : fields.items()) {
    if (name != kMetadata) {
      header.tensors.push_back(parse_tensor(name, value, where));
      continue;
    }
    if (!value.is_object()) throw Error(concat("[", where, "] '", kMetadata, "' is no object; the file is damaged"));
    for (const auto& [key, entry] : value.items()) {
      header.metadata[key] = member(value, key.c_str(), json::value_t::string, where).get<std::string>();
    }
  }
  std::sort(header.tensors.begin(), header.tensors.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
  });
  int64_t end = 0;
  const int64_t data_bytes = file_bytes - data_start;
  for (TensorEntry& entry : header.tensors) {
    if (entry.offset != end || entry.bytes > data_bytes - end) {
      throw Error(concat("[", where, ", tensor '", shown(entry.name), "'] its bytes are ", entry.offset, " to ",
                         entry.offset + entry.bytes, " of ", data_bytes, ", expected to begin at ", end,
                         ", where the one before ends, and to be in the file; it is cut off or damaged"));
    }
    end += entry.bytes;
    entry.offset += data_start;
  }
  if (end != data_bytes) {
    throw Error(concat("[", where, "] the tensors' bytes end at ", end, ", expected at the file's end, ", data_bytes,
                       "; the file is damaged"));
  }
  return header;
}

SafetensorsHeader read_safetensors_header(const std::string& path, FileSystem& files) {
  File file = files.open_to_read(path);
  const int64_t file_bytes = file.size();
  std::string start(static_cast<std::size_t>(std::min(file_bytes, kLength_bytes)), '\0');
  file.read(0, start.data(), static_cast<int64_t>(start.size()));
  const int64_t length = header_bytes(start, file_bytes, path);
  start.resize(static_cast<std::size_t>(kLength_bytes + length));
  file.read(kLength_bytes, start.data() + kLength_bytes, length);
  return parse_safetensors_header(start, file_bytes, path);
}

}  // namespace roundpipe::files
