#include <roundpipe/saving/stored_checkpoint.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <exception>
#include <future>
#include <limits>
#include <stdexcept>
#include <string_view>

#include <ATen/ops/empty.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/fingerprint.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/files/crc32c.h>
#include <roundpipe/files/damage.h>
#include <roundpipe/files/json_text.h>
#include <roundpipe/files/safetensors.h>
#include <roundpipe/files/steps.h>
#include <roundpipe/files/verify.h>
#include <roundpipe/saving/contents.h>
#include <roundpipe/saving/state_check.h>
#include <roundpipe/saving/state_encoding.h>

namespace roundpipe {

using files::DamagedCheckpoint;
using files::FileRecord;
using files::reading;
using nlohmann::json;

namespace {

constexpr size_t kReaders = 4;
constexpr std::chrono::milliseconds kBetweenLooks{50};
// What the encoders make at most is nested about 200 deep.
constexpr files::JsonLimits kLimits{.depth = 256, .values = 20'000'000};
constexpr int64_t kMostState_bytes = int64_t{2} << 30;
constexpr std::string_view kTensorFile = ".safetensors";
constexpr std::string_view kOfRank = "rank-";

// "rank-00003-state.json" -> 3 and "state.json"
std::pair<int64_t, std::string> parted(const std::string& file) {
  if (file.starts_with(kOfRank)) {
    int64_t rank = 0;
    const char* const first = file.data() + kOfRank.size();
    const auto [end, error] = std::from_chars(first, file.data() + file.size(), rank);
    if (end != first && end != file.data() + file.size() && *end == '-') {
      if (error != std::errc{} || rank < 0) rank = std::numeric_limits<int64_t>::max();
      return {rank, std::string(end + 1)};
    }
  }
  return {StoredCheckpoint::kOfAll, file};
}

// Of a file with tensors; empty for others.
std::string section_of(const std::string& name) {
  if (!name.ends_with(kTensorFile) || name == kStateTensors) return {};
  const std::string stem = name.substr(0, name.size() - kTensorFile.size());
  return stem == "adapter_model" ? kWeights : stem.substr(0, stem.find('-'));
}

// What the file `name` of a state is called.
std::string name_of(const std::string& name, int64_t rank) {
  return rank == StoredCheckpoint::kOfAll ? name : of_rank(name, rank);
}

}  // namespace

StoredCheckpoint::StoredCheckpoint(const std::string& folder, Scope scope)
    : folder_(folder),
      scope_(scope),
      manifest_(reading(folder, [&] { return files::require_complete(folder); })),
      text_(small_file(kStateFile)) {
  const bool is_alone = nodes() == 1;
  if (!is_alone && scope_ == Scope::kAll) {
    for (int64_t rank = 0; rank < nodes(); ++rank) texts_of_ranks_.push_back(small_file(name_of(kStateFile, rank)));
    sections_of_ranks_.resize(texts_of_ranks_.size());
  }
  for (const FileRecord& record : manifest_.files) add_section(record.name);
  state_ = reading(path_of(kStateFile), [&] { return files::parse_json(text_, path_of(kStateFile), kLimits); });
  check_state_of(kOfAll, state_);
  for (size_t i = 0; i < texts_of_ranks_.size(); ++i) {
    const auto rank = static_cast<int64_t>(i);
    const std::string path = path_of(name_of(kStateFile, rank));
    states_of_ranks_.push_back(reading(path, [&] { return files::parse_json(texts_of_ranks_[i], path, kLimits); }));
    check_state_of(rank, states_of_ranks_.back());
  }
  if (!states_of_ranks_.empty()) {
    reading(folder_, [&] { check_ranges(states_of_ranks_, sections_of_ranks_, section(kWeights), folder_); });
  }
  if (scope_ == Scope::kWeights) return;
  for (int64_t rank = 0; rank < nodes(); ++rank) add_parts(rank);
  for (auto& [key, parts] : parts_) std::ranges::stable_sort(parts, {}, &Part::first);
}

void StoredCheckpoint::add_parts(int64_t rank) {
  const auto optimizer = sections(rank).find(kOptimizer);
  if (optimizer == sections(rank).end()) return;
  for (const auto& [key, tensor] : optimizer->second) {
    Part part{tensor, 0, std::nullopt};
    if (nodes() > 1) {
      const json& range = state(rank).at("ranges").at(key.substr(0, key.rfind('/')));
      part.first = range[0].get<int64_t>();
      part.last = range[1].get<int64_t>();
    }
    parts_[key].push_back(std::move(part));
  }
}

const std::vector<StoredCheckpoint::Part>& StoredCheckpoint::parts_of(const std::string& key) const {
  const auto found = parts_.find(key);
  if (found != parts_.end()) return found->second;
  require_whole({kOptimizer});
  throw DamagedCheckpoint(concat("[load_checkpoint] ", folder_, " has no '", files::shown(key),
                                 "' in its optimizer files, expected it, as its state says; use another checkpoint"));
}

const json* StoredCheckpoint::counters(const std::string& name) const {
  for (int64_t rank = 0; rank < nodes(); ++rank) {
    const auto counters = state(rank).find("counters");
    if (counters == state(rank).end()) continue;
    const auto found = counters->find(name);
    if (found != counters->end()) return &*found;
  }
  return nullptr;
}

std::optional<double> StoredCheckpoint::last_norm() const {
  const auto norm = state(0).find("last_norm");
  if (norm == state(0).end()) return std::nullopt;
  return norm->get<double>();
}

std::optional<std::vector<int64_t>> StoredCheckpoint::strides(const std::string& name) const {
  const auto strides = state(0).find("strides");
  if (nodes() == 1 || strides == state(0).end() || !strides->contains(name)) return std::nullopt;
  return strides->at(name).get<std::vector<int64_t>>();
}

std::vector<int64_t> StoredCheckpoint::shape(const std::string& name) const {
  const auto weights = section(kWeights).find(name);
  if (weights != section(kWeights).end()) return weights->second.shape;
  int64_t end = 0;
  for (const auto& [key, parts] : parts_) {
    if (!key.starts_with(name + "/")) continue;
    for (const Part& part : parts) end = std::max(end, part.last ? *part.last : part.count());
  }
  return {end};
}

void StoredCheckpoint::add_section(const std::string& file) {
  const auto [rank, name] = nodes() > 1 ? parted(file) : std::pair{kOfAll, file};
  if (rank >= nodes()) {
    throw DamagedCheckpoint(concat("[load_checkpoint] ", folder_, " has a file of rank ", rank,
                                   ", expected ranks below ", nodes(),
                                   ", as its manifest says; use another checkpoint"));
  }
  const std::string section = section_of(name);
  if (section.empty()) return;
  if (scope_ == Scope::kWeights && (rank != kOfAll || (section != kWeights && section != kBuffers))) return;
  Section& found = (rank == kOfAll ? sections_ : sections_of_ranks_.at(static_cast<size_t>(rank)))[section];
  Section added = header(file);
  found.merge(added);
  if (added.empty()) return;
  throw files::damage_of(path_of(file), concat("'", files::shown(added.begin()->first),
                                               "' is in another file as well; use another checkpoint"));
}

void StoredCheckpoint::check_state_of(int64_t rank, const json& state) const {
  StateKind kind = nodes() == 1 ? StateKind::kAlone : rank == kOfAll ? StateKind::kCommon : StateKind::kRank;
  if (scope_ == Scope::kWeights) kind = StateKind::kWeights;
  const Section tensors = kind == StateKind::kWeights ? Section() : state_tensor_places(rank);
  const std::string path = path_of(name_of(kStateFile, rank));
  reading(path, [&] {
    try {
      check_state(state, kind, tensors, path);
    } catch (const Error&) {
      // A name that has changed in the file of the tensors is missing here.
      const FileRecord* const record =
          kind == StateKind::kWeights ? nullptr : manifest_.find(name_of(kStateTensors, rank));
      if (record != nullptr) verify({*record});
      throw;
    }
  });
}

std::string StoredCheckpoint::path_of(const std::string& file) const { return files::join(folder_, file); }

const FileRecord& StoredCheckpoint::record_of(const std::string& file) const {
  if (const FileRecord* const record = manifest_.find(file)) return *record;
  throw DamagedCheckpoint(concat("[load_checkpoint] ", folder_, " has no ", file,
                                 ", expected a checkpoint of save_checkpoint; use another one"));
}

std::string StoredCheckpoint::small_file(const std::string& name) const {
  const FileRecord& record = record_of(name);
  const std::string path = path_of(name);
  std::string text = reading(path, [&] { return files::FileSystem::real().read_small(path, kMostState_bytes); });
  if (files::crc32c(text.data(), text.size()) != record.crc32c) {
    throw DamagedCheckpoint(concat("[load_checkpoint] ", path,
                                   " has another checksum than its manifest says; it is damaged, use another "
                                   "checkpoint"));
  }
  note_whole(name);
  return text;
}

StoredCheckpoint::Section StoredCheckpoint::header(const std::string& file) const {
  const std::string path = path_of(file);
  return reading(path, [&] {
    Section found;
    for (const files::TensorEntry& entry : files::read_safetensors_header(path).tensors)
      found[entry.name] = {file, saving::dtype_of(entry, path), entry.shape, entry.bytes};
    return found;
  });
}

StoredCheckpoint::Section StoredCheckpoint::state_tensor_places(int64_t rank) const {
  const std::string file = name_of(kStateTensors, rank);
  return manifest_.find(file) == nullptr ? Section() : header(file);
}

const json& StoredCheckpoint::state(int64_t rank) const {
  return rank == kOfAll || nodes() == 1 ? state_ : states_of_ranks_.at(static_cast<size_t>(rank));
}

const std::string& StoredCheckpoint::state_text(int64_t rank) const {
  return rank == kOfAll || nodes() == 1 ? text_ : texts_of_ranks_.at(static_cast<size_t>(rank));
}

const StoredCheckpoint::Sections& StoredCheckpoint::sections(int64_t rank) const {
  return rank == kOfAll || nodes() == 1 ? sections_ : sections_of_ranks_.at(static_cast<size_t>(rank));
}

const StoredCheckpoint::Section& StoredCheckpoint::section(const std::string& name) const {
  static const Section none;
  const auto found = sections_.find(name);
  return found == sections_.end() ? none : found->second;
}

const saving::StoredTensor& StoredCheckpoint::place(const std::string& section_name, const std::string& name) const {
  const Section& found = section(section_name);
  const auto tensor = found.find(name);
  if (tensor != found.end()) return tensor->second;
  require_whole({section_name});
  throw DamagedCheckpoint(concat("[load_checkpoint] ", folder_, " has no '", files::shown(name), "' in its ",
                                 section_name, " files, expected it, as its state says; use another checkpoint"));
}

const std::map<std::string, at::Tensor>& StoredCheckpoint::state_tensors(int64_t rank) {
  if (nodes() == 1) rank = kOfAll;
  const auto found = values_.find(rank);
  if (found != values_.end()) return found->second;
  std::map<std::string, at::Tensor> values;
  for (const auto& [name, tensor] : state_tensor_places(rank)) values[name] = at::empty(tensor.shape, tensor.dtype);
  if (!values.empty()) read_files({{name_of(kStateTensors, rank), {values.begin(), values.end()}}});
  return values_[rank] = std::move(values);
}

StateValue StoredCheckpoint::value(const json& encoded, const std::string& path, int64_t rank) {
  const std::map<std::string, at::Tensor>& tensors = state_tensors(rank);
  return reading(path_of(name_of(kStateFile, nodes() == 1 ? kOfAll : rank)), [&] {
    return decode_state(encoded, [&](const std::string& name) { return tensors.at(name); }, path);
  });
}

uint64_t StoredCheckpoint::fingerprint(const json& encoded, int64_t rank) {
  const std::string text = encoded.dump();
  uint64_t print = roundpipe::fingerprint(text.data(), text.size());
  for (const std::string& name : tensor_names(encoded))
    print = join_fingerprints(print, fingerprint_of(state_tensors(rank).at(name)));
  return print;
}

void StoredCheckpoint::read(const Destinations& destinations) const {
  FileDestinations by_file;
  for (const auto& [name, tensors] : destinations) {
    for (const auto& [in_file, tensor] : tensors) by_file[place(name, in_file).file].emplace_back(in_file, tensor);
  }
  read_files(by_file);
}

namespace {

// Runs jobs on a few threads, and ends all of them at the first error or interrupt.
template <typename Job>
void run_jobs(const std::vector<Job>& jobs) {
  std::atomic<size_t> next{0};
  std::atomic<bool> stopped{false};
  Mutex mutex;
  std::exception_ptr first;
  const auto stop = [&](const std::exception_ptr& error) {
    const MutexLock lock(mutex);
    if (!stopped.exchange(true)) first = error;
  };
  const auto work = [&] {
    for (size_t job = next++; job < jobs.size() && !stopped; job = next++) {
      try {
        jobs[job]([&](int64_t) {
          if (stopped) throw Cancelled("[load_checkpoint] another file could not be read");
        });
      } catch (...) {
        stop(std::current_exception());
      }
    }
  };
  std::vector<std::future<void>> readers;
  for (size_t i = 0; i < std::min(kReaders, jobs.size()); ++i) readers.push_back(std::async(std::launch::async, work));
  for (const std::future<void>& reader : readers) {
    while (reader.wait_for(kBetweenLooks) != std::future_status::ready) {
      try {
        if (!stopped) frontend().check_interrupt();
      } catch (...) {
        stop(std::current_exception());
      }
    }
  }
  const MutexLock lock(mutex);
  if (first) std::rethrow_exception(first);
}

}  // namespace

void StoredCheckpoint::read_file(const std::string& file, const std::vector<saving::Destination>& destinations,
                                 const Progress& progress) const {
  reading(path_of(file), [&] { saving::read_tensors(folder_, record_of(file), destinations, progress); });
  note_whole(file);
}

void StoredCheckpoint::check_shape(const std::string& file, const std::string& name, const at::Tensor& taker) const {
  const auto [rank, in_rank] = nodes() > 1 ? parted(file) : std::pair{kOfAll, file};
  const Sections& all = sections(rank);
  const auto section = all.find(section_of(in_rank));
  if (section == all.end()) return;  // of a state, whose tensors are made by their shapes
  const auto found = section->second.find(name);
  if (found != section->second.end() && taker.sizes() == at::IntArrayRef(found->second.shape)) return;
  verify({record_of(file)});
  if (found == section->second.end()) {
    throw files::damage_of(path_of(file), concat("'", files::shown(name), "' is not there"));
  }
  throw std::invalid_argument(concat("[load_checkpoint] '", name, "' has shape ", at::IntArrayRef(found->second.shape),
                                     " in ", path_of(file), ", expected ", taker.sizes(),
                                     "; load it into the model that was saved"));
}

void StoredCheckpoint::read_files(const FileDestinations& destinations) const {
  for (const auto& [file, tensors] : destinations) {
    for (const auto& [name, tensor] : tensors) check_shape(file, name, tensor);
  }
  std::vector<std::function<void(const Progress&)>> jobs;
  for (const auto& [file, tensors] : destinations) {
    jobs.emplace_back(
        [this, &file = file, &tensors = tensors](const Progress& progress) { read_file(file, tensors, progress); });
  }
  run_jobs(jobs);
}

void StoredCheckpoint::read_ranges(const FileRanges& ranges) const {
  std::vector<std::function<void(const Progress&)>> jobs;
  for (const auto& [file, parts] : ranges) {
    jobs.emplace_back([this, &file = file, &parts = parts](const Progress&) {
      reading(path_of(file), [&] { saving::read_ranges(folder_, record_of(file), parts); });
    });
  }
  run_jobs(jobs);
}

bool StoredCheckpoint::is_whole(const std::string& file) const {
  const MutexLock lock(mutex_);
  return whole_.contains(file);
}

void StoredCheckpoint::note_whole(const std::string& file) const {
  const MutexLock lock(mutex_);
  whole_.insert(file);
}

void StoredCheckpoint::verify(const std::vector<FileRecord>& records) const {
  files::VerifyOptions options;
  options.progress = [](int64_t, int64_t) { frontend().check_interrupt(); };
  const std::vector<files::FileProblem> problems = files::verify_files(folder_, records, options);
  if (!problems.empty()) throw files::damage_of(path_of(problems[0].file), problems[0].problem);
  for (const FileRecord& record : records) note_whole(record.name);
}

void StoredCheckpoint::require_whole(const std::vector<std::string>& sections) const {
  std::vector<FileRecord> records;
  for (const FileRecord& record : manifest_.files) {
    const std::string section = section_of(nodes() > 1 ? parted(record.name).second : record.name);
    if (std::ranges::find(sections, section) != sections.end() && !is_whole(record.name)) records.push_back(record);
  }
  verify(records);
}

void StoredCheckpoint::verify_rest(int64_t rank, int64_t size) const {
  if (scope_ == Scope::kWeights) return require_whole({kWeights, kBuffers});
  std::vector<FileRecord> records;
  for (size_t i = 0; i < manifest_.files.size(); ++i) {
    const bool is_own = static_cast<int64_t>(i) % size == rank;
    if (is_own && !is_whole(manifest_.files[i].name)) records.push_back(manifest_.files[i]);
  }
  verify(records);
}

std::vector<std::string> checkpoints_in(const std::string& folder) {
  files::FileSystem& files = files::FileSystem::real();
  if (files.look(files::join(folder, files::kManifestName)).kind != files::EntryKind::kNothing) {
    return {folder};
  }
  std::vector<std::string> found;
  for (const int64_t step : files::complete_steps(folder))
    found.insert(found.begin(), files::join(folder, files::step_name(step)));
  return found;
}

}  // namespace roundpipe
