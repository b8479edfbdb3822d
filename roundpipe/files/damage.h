#pragma once

#include <string>
#include <string_view>

#include <roundpipe/core/error.h>
#include <roundpipe/files/file_system.h>

namespace roundpipe::files {

// A checkpoint cannot be used as the disk has it: a file is missing, cannot be read, is damaged, or does not hold what
// checkpoints have there. The message names the file. One before it may be whole.
class ROUNDPIPE_API DamagedCheckpoint : public Error {
 public:
  using Error::Error;
};

// `problem`, which is about the file at `path`, as damage that names it.
inline DamagedCheckpoint damage_of(const std::string& path, std::string_view problem) {
  if (problem.starts_with("[") && problem.find(path) != std::string_view::npos) {
    return DamagedCheckpoint(std::string(problem));
  }
  return DamagedCheckpoint(concat("[checkpoint] ", path, ": ", problem));
}

// Calls `read`, which reads the file or folder at `path`; an Error of it is thrown as damage. What is not the disk's,
// such as a lack of descriptors or an interrupt, is thrown on as it is.
template <typename Read>
auto reading(const std::string& path, Read read) {
  try {
    return read();
  } catch (const DamagedCheckpoint&) {
    throw;
  } catch (const Cancelled&) {
    throw;
  } catch (const ProcessLimit&) {
    throw;
  } catch (const Error& error) {
    throw damage_of(path, error.what());
  }
}

// Checkpoints that this process has found damaged, by their folders: a save may replace them. Any thread.
void note_damaged(const std::string& folder);
bool is_known_damaged(const std::string& folder);
void forget_damaged(const std::string& folder);

}  // namespace roundpipe::files
