#include <roundpipe/files/step_files.h>

#include <stdexcept>
#include <utility>

#include <roundpipe/core/error.h>
#include <roundpipe/files/manifest.h>

namespace roundpipe::files {

StepFiles::StepFiles(std::string folder, FileSystem& files) : folder_(std::move(folder)), files_(files) {}

OutputFile& StepFiles::create(const std::string& name, int64_t bytes) {
  if (!is_file_name(name)) {
    throw std::invalid_argument(concat("[checkpoint] '", name,
                                       "' cannot be a file of a checkpoint; expected a plain "
                                       "name without '/', not beginning with '.'"));
  }
  MutexLock lock(mutex_);
  auto& output = outputs_[name];
  if (output) {
    throw std::invalid_argument(concat("[checkpoint] '", name, "' is in the checkpoint already; use another name"));
  }
  try {
    output = std::make_unique<OutputFile>(files_, folder_, name, bytes);
  } catch (...) {
    outputs_.erase(name);
    throw;
  }
  return *output;
}

void StepFiles::add_small(const std::string& name, const std::string& contents) {
  OutputFile& file = create(name, static_cast<int64_t>(contents.size()));
  file.write_at(0, contents.data(), file.bytes());
  file.finish();
}

std::vector<FileRecord> StepFiles::finish() {
  std::vector<FileRecord> records;
  MutexLock lock(mutex_);
  for (const auto& [name, output] : outputs_) records.push_back(output->finish());
  return records;
}

void StepFiles::close() {
  MutexLock lock(mutex_);
  outputs_.clear();
}

}  // namespace roundpipe::files
