#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <roundpipe/files/file_system.h>
#include <roundpipe/files/output_file.h>

namespace roundpipe::files {

struct FileProblem {
  std::string file;  // "manifest.json" where the manifest itself is not right, and then it is the only one
  std::string problem;
};

struct VerifyOptions {
  int threads = 4;
  // Called on the caller's thread, with the bytes read so far, at the start and about every 16 MB. What it throws ends
  // the verification, and is thrown on.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress = {};
};

// Reads all files of a checkpoint and compares sizes and checksums with its manifest. Returns what is not right, in the
// manifest's order; nothing = the checkpoint is whole. Files that the manifest does not name are not looked at. A file
// that the disk does not read back is a problem, too. Throws only what `progress` throws, std::invalid_argument, and
// ProcessLimit.
std::vector<FileProblem> verify_step(const std::string& folder, const VerifyOptions& options = {},
                                     FileSystem& files = FileSystem::real());

// The same of some of a checkpoint's files.
std::vector<FileProblem> verify_files(const std::string& folder, std::vector<FileRecord> records,
                                      const VerifyOptions& options = {}, FileSystem& files = FileSystem::real());

}  // namespace roundpipe::files
