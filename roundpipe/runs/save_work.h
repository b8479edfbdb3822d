#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/device/event.h>
#include <roundpipe/files/run_folder.h>
#include <roundpipe/runs/run_folders.h>
#include <roundpipe/runtime/pipeline.h>
#include <roundpipe/saving/contents.h>

namespace roundpipe {

// Throws std::invalid_argument for numbers that no save can have.
void check_save(int64_t step, std::optional<int64_t> keep_last, int64_t keep_every);

// How much a save of these models holds beside the state if nobody says it: what the host's budget leaves or, without
// one, half of the free memory; at least two blocks with moments in fp32.
int64_t default_snapshot_bytes(const std::vector<std::shared_ptr<runtime::Pipeline>>& models,
                               std::optional<int64_t> host_budget_bytes);

// A checkpoint that is being written, on a thread of its own.
//
// Several ranks write one together, in parts: each part succeeds on all of them, or fails on all. The first one makes
// the folder and completes the checkpoint. The process waits for it when it ends: see run_folders.h.
// Thread safety: any thread.
class SaveWork : public std::enable_shared_from_this<SaveWork> {
 public:
  // Calls `part`, and returns what the parts of all ranks have returned, by rank. Throws on all ranks if one throws.
  using Part = std::function<std::string()>;
  using Agree = std::function<std::vector<std::string>(const Part& part)>;

  struct Settings {
    int64_t step = 0;
    std::string path = {};                       // of the run's folder
    std::shared_ptr<files::RunFolder> run = {};  // null: not the first rank
    bool overwrite = false;
    std::optional<int64_t> keep_last = std::nullopt;
    int64_t keep_every = 0;
    int64_t shard_bytes = kShard_bytes;
    Agree agree = [](const Part& part) { return std::vector{part()}; };
    // Tells the user a line.
    std::function<void(const std::string& line)> tell = {};
    // Tells the user an error, since nobody waits; null: somebody does. `text` of a C++ error.
    std::function<std::string(const std::exception_ptr& error)> text_of = {};
  };

  SaveWork(Settings settings, std::shared_ptr<Contents> contents, std::shared_ptr<saving::SnapshotMemory> memory);
  // `finish` completes the contents, on the save's thread. `began_ms`: when the caller was called. If there can be no
  // thread, throws, and the save is over.
  void start(std::function<void()> finish, double began_ms);

  int64_t step() const { return settings_.step; }
  // Where it will be.
  const std::string& folder() const { return folder_; }
  bool done() const { return over_->complete(); }
  const std::string& path() const { return settings_.path; }
  // Fires when it is over.
  const device::EventPtr& over() const { return over_; }
  // Waits until the checkpoint is complete, and throws why it is not.
  SaveReport wait() const;
  // Returns when the state may change.
  void wait_read() const;
  // Waits until the save is over, whether it has failed or not.
  void wait_over() const;
  void note_caller_seconds(double seconds) { caller_seconds_ = seconds; }

 private:
  void run_all() noexcept;
  void end() noexcept;
  void write();
  std::string prepare();
  std::string begin(int64_t total_bytes);
  std::string write_files(const std::string& place);
  template <typename Writer>
  void write_into(Writer& writer);
  void commit(const std::vector<std::string>& records);
  void tell_failure() noexcept;

  Settings settings_;
  const std::string folder_;
  const std::shared_ptr<saving::SnapshotMemory> memory_;
  const device::EventPtr read_ = device::make_event();
  const device::EventPtr over_ = device::make_event();
  double caller_seconds_ = 0;
  double began_ms_ = 0;
  // Of the save's thread until `over_` fires.
  std::shared_ptr<Contents> contents_;
  std::function<void()> finish_;
  std::vector<Contents::File> files_;
  std::map<std::string, std::string> texts_;
  std::unique_ptr<files::StepWriter> writer_;
  std::optional<bool> placed_ = false;  // unset: the first rank knows
  int64_t bytes_ = 0;
  double seconds_ = 0;
  std::exception_ptr error_;
};

}  // namespace roundpipe
