#include <roundpipe/runs/save_work.h>

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <stdexcept>
#include <thread>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/error.h>
#include <roundpipe/files/steps.h>
#include <roundpipe/memory/host_arena.h>
#include <roundpipe/memory/host_room.h>
#include <roundpipe/saving/tensor_files.h>

namespace roundpipe {

using files::FileRecord;

namespace {

constexpr int kThreads = 2;

// Records of files, a line for each; names come last, since they may have spaces.
std::string lines_of(const std::vector<FileRecord>& records) {
  std::string text;
  for (const FileRecord& record : records) text += concat(record.crc32c, " ", record.bytes, " ", record.name, "\n");
  return text;
}

std::vector<FileRecord> records_in(const std::string& text) {
  std::istringstream lines(text);
  std::vector<FileRecord> records;
  for (FileRecord record; lines >> record.crc32c >> record.bytes && std::getline(lines >> std::ws, record.name);)
    records.push_back(record);
  return records;
}

}  // namespace

void check_save(int64_t step, std::optional<int64_t> keep_last, int64_t keep_every) {
  const auto require = [](const char* name, int64_t value, int64_t least) {
    if (value >= least) return;
    throw std::invalid_argument(concat("[save_checkpoint] ", name, " is ", value, ", expected at least ", least));
  };
  require("step", step, 0);
  require("keep_last", keep_last.value_or(1), 1);
  require("keep_every", keep_every, 0);
  if (keep_every == 0 || keep_last) return;
  throw std::invalid_argument(
      "[save_checkpoint] keep_every has no effect without keep_last, expected both; give keep_last");
}

int64_t default_snapshot_bytes(const std::vector<std::shared_ptr<runtime::Pipeline>>& models,
                               std::optional<int64_t> host_budget_bytes) {
  int64_t largest = 0;
  for (const auto& model : models) {
    for (const runtime::BlockState& block : model->model().blocks) {
      int64_t bytes = 0;
      for (const memory::NamedTensor& parameter : block.block->parameters())
        bytes += static_cast<int64_t>(parameter.tensor.nbytes()) + 12 * parameter.tensor.numel();
      largest = std::max(largest, bytes);
    }
  }
  const int64_t left =
      host_budget_bytes ? *host_budget_bytes - memory::host_arena_stats().asked_bytes : memory::free_host_bytes() / 2;
  return std::max(left, 2 * largest);
}

SaveWork::SaveWork(Settings settings, std::shared_ptr<Contents> contents,
                   std::shared_ptr<saving::SnapshotMemory> memory)
    : settings_(std::move(settings)),
      folder_(files::join(settings_.path, files::step_name(settings_.step))),
      memory_(std::move(memory)),
      contents_(std::move(contents)) {}

void SaveWork::start(std::function<void()> finish, double began_ms) {
  finish_ = std::move(finish);
  began_ms_ = began_ms;
  try {
    std::thread([work = shared_from_this()]() mutable {
      const device::EventPtr over = work->over_;
      work->run_all();
      // The last one who holds it may be this thread, which must not outlive the interpreter with an error of it.
      work.reset();
      over->fire();
    }).detach();
  } catch (...) {
    error_ = std::current_exception();
    settings_.text_of = nullptr;  // the caller is told
    end();
    over_->fire();
    throw;
  }
}

SaveReport SaveWork::wait() const {
  device::wait_interruptible(*over_);
  if (error_) std::rethrow_exception(error_);
  const saving::SnapshotMemory::Report memory = memory_->report();
  return {.bytes = bytes_,
          .seconds = seconds_,
          .caller_seconds = caller_seconds_,
          .longest_wait_seconds = memory.longest_wait_ms / 1000,
          .waited_seconds = memory.total_wait_ms / 1000,
          .held_bytes = memory.most_bytes};
}

void SaveWork::wait_read() const {
  const double before_ms = now_ms();
  device::wait_interruptible(*read_);
  memory_->note_wait(now_ms() - before_ms);
}

void SaveWork::wait_over() const { device::wait_interruptible(*over_); }

void SaveWork::run_all() noexcept {
  try {
    write();
  } catch (...) {
    error_ = std::current_exception();
  }
  end();
}

void SaveWork::end() noexcept {
  if (contents_->snapshot() != nullptr) contents_->snapshot()->cancel();
  files_.clear();
  texts_.clear();
  writer_.reset();  // which removes what is not complete
  contents_.reset();
  finish_ = nullptr;
  settings_.agree = nullptr;
  if (error_ && settings_.text_of) tell_failure();
  settings_.tell = nullptr;
  settings_.text_of = nullptr;
  seconds_ = (now_ms() - began_ms_) / 1000;
  read_->fire();
}

void SaveWork::tell_failure() noexcept {
  try {
    settings_.tell(files::failed_save_notice(settings_.step, settings_.text_of(error_), placed_));
  } catch (...) {  // wait() throws the error
  }
}

void SaveWork::write() {
  const std::vector<std::string> prepared = settings_.agree([this] { return prepare(); });
  int64_t total_bytes = 0;
  std::vector<std::string> prints;
  for (const std::string& told : prepared) {
    total_bytes += std::stoll(told);
    prints.push_back(told.substr(told.find(' ')));
    if (prints.back() == prints.front()) continue;
    throw Error(
        concat("[save_checkpoint] the optimizer's options, schedulers, scaler or number of steps differ between "
               "rank 0 and rank ",
               prints.size() - 1, ", expected the same on all ranks; give what differs as state="));
  }
  const std::string place = settings_.agree([&] { return begin(total_bytes); }).front();
  const std::vector<std::string> records = settings_.agree([&] { return write_files(place); });
  if (settings_.run == nullptr) placed_.reset();
  settings_.agree([&] {
    commit(records);
    return std::string();
  });
}

// Lays out this rank's files. Returns their size, and a fingerprint of what all ranks have.
std::string SaveWork::prepare() {
  finish_();
  files_ = contents_->tensor_files(settings_.shard_bytes);
  texts_ = contents_->text_files(files_);
  for (const Contents::File& file : files_) bytes_ += file.layout.file_bytes;
  for (const auto& [name, text] : texts_) bytes_ += static_cast<int64_t>(text.size());
  return concat(bytes_, " ", contents_->fingerprint());
}

// Makes the hidden folder, on the first rank. Returns its name in the run's folder.
std::string SaveWork::begin(int64_t total_bytes) {
  if (settings_.run == nullptr) return {};
  writer_ = settings_.run->begin(settings_.step, {total_bytes, settings_.overwrite});
  return std::filesystem::path(writer_->folder()).filename().string();
}

// Writes this rank's files into the hidden folder. Returns records of those that the first rank did not write.
std::string SaveWork::write_files(const std::string& place) {
  if (writer_) {
    write_into(*writer_);
    return {};
  }
  const std::string folder = files::join(settings_.path, place);
  struct stat found{};
  if (::stat(folder.c_str(), &found) != 0 || !S_ISDIR(found.st_mode)) {
    throw Error(concat("[save_checkpoint] rank ", contents_->rank(), " does not see ", folder,
                       ", which rank 0 has made, expected one folder that all ranks share; give one on a file system "
                       "of the network"));
  }
  files::StepFiles files(folder);
  write_into(files);
  const std::vector<FileRecord> records = files.finish();
  files.sync_names();
  return lines_of(records);
}

template <typename Writer>
void SaveWork::write_into(Writer& writer) {
  std::map<size_t, saving::Target> targets;
  std::vector<std::pair<saving::Target, const CapturedTensor*>> plain;
  for (const Contents::File& file : files_) {
    files::OutputFile& output = writer.create(file.name, file.layout.file_bytes);
    output.write_at(0, file.layout.header.data(), static_cast<int64_t>(file.layout.header.size()));
    for (size_t i = 0; i < file.tensors.size(); ++i) {
      const saving::Target target{&output, file.layout.tensors[i].offset};
      if (file.tensors[i].piece)
        targets[*file.tensors[i].piece] = target;
      else
        plain.emplace_back(target, &file.tensors[i]);
    }
  }
  if (contents_->snapshot() != nullptr) {
    contents_->snapshot()->write(
        [&](size_t piece, const at::Tensor& tensor) { saving::write_tensor(targets.at(piece), tensor); }, kThreads);
  }
  for (const auto& [target, item] : plain) saving::write_tensor(target, item->source().to(item->tensor.scalar_type()));
  read_->fire();
  for (const auto& [name, text] : texts_) writer.add_small(name, text);
}

// Completes the checkpoint, on the first rank.
void SaveWork::commit(const std::vector<std::string>& records) {
  if (!writer_) return;
  for (size_t rank = 0; rank < records.size(); ++rank) writer_->adopt(records_in(records[rank]), concat("rank ", rank));
  try {
    writer_->commit(contents_->versions(), contents_->size());
  } catch (...) {
    placed_ = writer_->placed();
    throw;
  }
  placed_ = true;
  if (!settings_.keep_last) return;
  const files::Retention retention{*settings_.keep_last, settings_.keep_every, settings_.step};
  for (const std::string& notice : settings_.run->prune(retention).notices)
    settings_.tell("[save_checkpoint] " + notice);
}

}  // namespace roundpipe
