#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <roundpipe/files/file_system.h>
#include <roundpipe/files/output_file.h>

namespace roundpipe::files {

inline constexpr const char* kManifestName = "manifest.json";

// The major version changes when older readers would misread a checkpoint, the minor one when they miss only what is
// new.
inline constexpr int64_t kFormatMajor = 1;
inline constexpr int64_t kFormatMinor = 0;
// Of a checkpoint that several nodes have written.
inline constexpr int64_t kNodesFormatMajor = 2;

// What makes a folder a checkpoint: its files, with their sizes and checksums. It is written last.
struct Manifest {
  int64_t step = 0;
  std::vector<FileRecord> files;
  std::map<std::string, std::string> writer;  // what wrote it: {"roundpipe": "0.1.0", "torch": "2.13.0", ...}
  int64_t nodes = 1;                          // processes that trained together, each with files of its own
  std::string format = {};                    // set by parse: "1.0"

  // Null where there is no such file.
  const FileRecord* find(std::string_view name) const;
};

// Whether a file of this name may be in a checkpoint: 1 to 255 printable ASCII characters, no '/' and no '\', not
// beginning with '.', and not the manifest's own. So no name leaves its folder.
bool is_file_name(std::string_view name);

// The text of manifest.json, its own checksum at the end. Throws std::invalid_argument for a bad name, or one twice,
// and for more nodes than files.
std::string print_manifest(const Manifest& manifest);

// Parses such a text, and checks all of it. Unknown fields are ignored; another major version is refused, by number.
// Throws Error that begins "[where]". Memory: bounded by the text's length.
Manifest parse_manifest(std::string_view text, const std::string& where);

// Of a checkpoint's folder.
Manifest read_manifest(const std::string& folder, FileSystem& files = FileSystem::real());

// Eight digits, as manifests have checksums.
std::string format_crc32c(uint32_t crc32c);

}  // namespace roundpipe::files
