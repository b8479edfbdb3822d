#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <roundpipe/files/file_system.h>

namespace roundpipe::files {

// The format of https://github.com/huggingface/safetensors: the length of a header, the header (JSON), and the tensors'
// bytes without gaps. Thread safety: any thread.

// A tensor to write.
struct TensorDescription {
  std::string name;
  std::string dtype;  // as the format names it: "BF16", "F32", "I64", "U8", "BOOL", ...
  std::vector<int64_t> shape;
};

// A tensor in a file. The offset counts from the file's first byte.
struct TensorEntry {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t offset = 0;
  int64_t bytes = 0;

  bool operator==(const TensorEntry&) const = default;
};

// The texts beside the tensors, such as {"format": "pt"}.
using SafetensorsMetadata = std::map<std::string, std::string>;

struct SafetensorsLayout {
  std::string header;                // what the file begins with
  std::vector<TensorEntry> tensors;  // in the order of their descriptions
  int64_t file_bytes = 0;
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  // in the order of their bytes
  SafetensorsMetadata metadata;
};

inline constexpr int64_t kMostSafetensorsHeader_bytes = 100'000'000;

// The bits of an element, 0 for a dtype that the format does not have.
int element_bits(std::string_view dtype);

// Lays out a file. The header fills a multiple of 8 bytes, and tensors of wider elements come first, so that each
// tensor is aligned to its elements; apart from that, bytes are in the order of the descriptions.
// Throws std::invalid_argument, naming the tensor, for an unknown dtype, a name twice, a size that is negative, too
// large or no whole number of bytes, and a header beyond what readers take.
SafetensorsLayout lay_out_safetensors(const std::vector<TensorDescription>& tensors,
                                      const SafetensorsMetadata& metadata = {});

// Parses the header of a file of `file_bytes`, of which `start` are the first bytes: at least the whole header.
// Everything is checked: lengths, dtypes, that shapes fit sizes, that the tensors' bytes are those behind the header,
// all of them, without gap or overlap. Throws Error that begins with "[where]". Memory: bounded by the header's length.
SafetensorsHeader parse_safetensors_header(std::string_view start, int64_t file_bytes, const std::string& where);

// The same of a file on disk, of which only the header is read.
SafetensorsHeader read_safetensors_header(const std::string& path, FileSystem& files = FileSystem::real());

}  // namespace roundpipe::files
