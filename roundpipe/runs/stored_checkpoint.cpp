#include <roundpipe/runs/stored_checkpoint.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>
#include <sstream>

#include <ATen/ops/empty.h>

#include <roundpipe/checkpoint/crc32c.h>
#include <roundpipe/checkpoint/json_text.h>
#include <roundpipe/checkpoint/safetensors.h>
#include <roundpipe/checkpoint/steps.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/runs/capture.h>
#include <roundpipe/saving/tensor_files.h>

namespace roundpipe {

namespace {

constexpr size_t kThreads = 4;
constexpr checkpoint::JsonLimits kLimits{.depth = 512, .values = 20'000'000};

}  // namespace

StoredCheckpoint::StoredCheckpoint(const std::string& folder)
    : folder_(folder), manifest_(checkpoint::require_complete(folder)) {
  state_ = checkpoint::parse_json(small_file(kStateFile), concat(folder, "/", kStateFile), kLimits);
  for (const checkpoint::FileRecord& record : manifest_.files) {
    constexpr std::string_view kEnding = ".safetensors";
    if (!record.name.ends_with(kEnding) || record.name == kStateTensors) continue;
    const std::string stem = record.name.substr(0, record.name.size() - kEnding.size());
    const std::string section = stem == "adapter_model" ? kWeights : stem.substr(0, stem.find('-'));
    sections_[section].merge(header(record.name));
  }
}

std::string StoredCheckpoint::small_file(const char* name) const {
  const checkpoint::FileRecord* const record = manifest_.find(name);
  if (record == nullptr) {
    throw Error(concat("[load_checkpoint] ", folder_, " has no ", name, ", expected a checkpoint of save_checkpoint"));
  }
  const std::string path = (std::filesystem::path(folder_) / name).string();
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  std::string text = std::move(content).str();
  if (!file || checkpoint::crc32c(text.data(), text.size()) != record->crc32c) {
    throw Error(concat("[load_checkpoint] ", path,
                       " has another checksum than its manifest says; it is damaged, use another checkpoint"));
  }
  return text;
}

StoredCheckpoint::Section StoredCheckpoint::header(const std::string& file) const {
  Section found;
  const std::string path = (std::filesystem::path(folder_) / file).string();
  for (const checkpoint::TensorEntry& entry : checkpoint::read_safetensors_header(path).tensors)
    found[entry.name] = {file, saving::dtype_of(entry, path), entry.shape};
  return found;
}

const StoredCheckpoint::Section& StoredCheckpoint::section(const std::string& name) const {
  static const Section none;
  const auto found = sections_.find(name);
  return found == sections_.end() ? none : found->second;
}

StateValue StoredCheckpoint::value(const nlohmann::json& encoded, const std::string& path) {
  if (!values_) {
    values_.emplace();
    if (const checkpoint::FileRecord* const record = manifest_.find(kStateTensors)) {
      for (const auto& [name, place] : header(kStateTensors)) (*values_)[name] = at::empty(place.shape, place.dtype);
      const std::vector<saving::Destination> all(values_->begin(), values_->end());
      saving::read_tensors(folder_, *record, all, [](int64_t) { frontend().check_interrupt(); });
    }
  }
  return decode_state(
      encoded,
      [&](const std::string& name) {
        const auto found = values_->find(name);
        if (found != values_->end()) return found->second;
        throw Error(concat("[load_checkpoint] ", path, " names the tensor '", checkpoint::shown(name), "', which ",
                           kStateTensors, " has not; the checkpoint is damaged"));
      },
      path);
}

void StoredCheckpoint::read(const Destinations& destinations) const {
  std::map<std::string, std::vector<saving::Destination>> by_file;
  for (const auto& [name, tensors] : destinations) {
    for (const auto& [in_file, tensor] : tensors) by_file[section(name).at(in_file).file].emplace_back(in_file, tensor);
  }
  std::vector<std::pair<std::string, std::vector<saving::Destination>>> files(by_file.begin(), by_file.end());
  std::atomic<size_t> next{0};
  std::vector<std::future<void>> readers;
  for (size_t i = 0; i < std::min(kThreads, files.size()); ++i) {
    readers.push_back(std::async(std::launch::async, [&] {
      for (size_t file = next++; file < files.size(); file = next++)
        saving::read_tensors(folder_, *manifest_.find(files[file].first), files[file].second, [](int64_t) {});
    }));
  }
  for (std::future<void>& reader : readers) reader.wait();
  for (std::future<void>& reader : readers) reader.get();
}

std::vector<std::string> checkpoints_in(const std::string& folder) {
  const std::filesystem::path path(folder);
  if (std::filesystem::exists(path / checkpoint::kManifestName)) return {folder};
  std::vector<std::string> found;
  for (const int64_t step : checkpoint::complete_steps(folder))
    found.insert(found.begin(), (path / checkpoint::step_name(step)).string());
  return found;
}

}  // namespace roundpipe
