#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <ATen/core/Tensor.h>

#include <roundpipe/files/safetensors.h>
#include <roundpipe/saving/snapshot.h>
#include <roundpipe/saving/state_encoding.h>

namespace roundpipe {

// Kinds of files in a checkpoint.
inline constexpr const char* kWeights = "model";
inline constexpr const char* kBuffers = "buffers";  // that are not beside the weights
inline constexpr const char* kPrevious = "previous";
inline constexpr const char* kOptimizer = "optimizer";
inline constexpr const char* kGradients = "gradients";
inline constexpr const char* kStateFile = "state.json";
inline constexpr const char* kStateTensors = "state.safetensors";
inline constexpr const char* kIndexFile = "model.safetensors.index.json";
// Names of the part of an fp32 master that a bf16 weight lacks, and of the master of an fp16 weight.
inline constexpr const char* kMasterRemainder = "master_remainder";
inline constexpr const char* kMaster = "master";
// Names of the copy of a parameter that an optimizer of torch updates, and of its gradient.
inline constexpr const char* kCopy = "copy";
inline constexpr const char* kCopyGradient = "copy_grad";
// The format of the state of torch's optimizers.
inline constexpr const char* kMomentsOfTorch = "torch";
inline constexpr int64_t kShard_bytes = 5'000'000'000;

// What the file `name` is called if one of several nodes has its own.
std::string of_rank(const std::string& name, int64_t rank);

// A tensor to write: its name in the file; its shape and dtype and, unless a snapshot's piece or another tensor has
// them, its values.
struct CapturedTensor {
  std::string name;
  at::Tensor tensor;
  std::optional<size_t> piece = std::nullopt;
  at::Tensor values = {};  // in any dtype

  const at::Tensor& source() const { return values.defined() ? values : tensor; }
};

// What one process writes of a checkpoint. Of several ranks, the first one has what is whole, and each what only it
// has. Thread safety: one thread at a time.
class Contents {
 public:
  // `is_adapter`: the weights are those of an adapter, in one file that peft reads.
  explicit Contents(int64_t rank = 0, int64_t size = 1, bool is_adapter = false)
      : rank_(rank), size_(size), is_adapter_(is_adapter) {}

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }

  using Section = std::pair<std::string, std::vector<CapturedTensor>>;
  void add(const std::string& section, CapturedTensor tensor);
  const std::vector<Section>& sections() const { return sections_; }
  // The bytes of the tensors in use that are to be written as they are now.
  int64_t plain_bytes() const;
  // Replaces these tensors by copies.
  void copy_plain();

  // Gathers the tensors of values: of those that all ranks have, or of this rank's own. A process that trains alone has
  // one of both.
  StateEncoder& encoder() { return common_.encoder; }
  StateEncoder& own_encoder() { return size_ == 1 ? common_.encoder : own_.encoder; }
  // What state.json has and, of several ranks, what this one's has. Called once all values are encoded. The texts are
  // as Python's json module prints them.
  void set_states(const nlohmann::ordered_json& common, const nlohmann::ordered_json& own);

  // Small files of the first rank, by name.
  std::map<std::string, std::string> files;

  // What writes the checkpoint, see files::Manifest; and a fingerprint of what is to be the same on all ranks.
  const std::map<std::string, std::string>& versions() const { return versions_; }
  uint64_t fingerprint() const { return fingerprint_; }

  // Fingerprints of the buffers, by their names in files. A rank leaves out those that the first rank writes with the
  // same values.
  std::map<std::string, uint64_t> buffer_fingerprints() const;
  void leave_out_buffers(const std::map<std::string, uint64_t>& of_first_rank);

  // What a parameter in a snapshot is called: in states, in weight files, and its optimizer's tensors.
  struct PlaceNames {
    std::string name, in_file;
    std::vector<std::string> moments;
  };
  // By block, counted as ModelOptimizer does, and parameter.
  using Places = std::map<std::pair<size_t, size_t>, PlaceNames>;
  void set_snapshot(std::shared_ptr<saving::Snapshot> snapshot, Places places);
  saving::Snapshot* snapshot() const { return snapshot_.get(); }
  // What a snapshot says beside its tensors, as states have it.
  struct SnapshotState {
    nlohmann::ordered_json counters = nlohmann::ordered_json::object();
    nlohmann::ordered_json strides = nlohmann::ordered_json::object();  // of weights that are not contiguous
    std::optional<double> last_norm;                                    // see ModelOptimizer::last_norm
  };
  // Waits until the snapshot can be written, and adds its tensors. Throws the error of a step: there is no state then.
  // Not on the caller's thread.
  SnapshotState take_snapshot();

  // A file with tensors, laid out.
  struct File {
    std::string name;
    std::vector<CapturedTensor> tensors;
    files::SafetensorsLayout layout;
  };
  // What this rank writes: each section in files of at most `shard_bytes`, and the states' tensors.
  std::vector<File> tensor_files(int64_t shard_bytes = kShard_bytes) const;
  // The small ones, by name. `laid_out`: those with tensors.
  std::map<std::string, std::string> text_files(const std::vector<File>& laid_out) const;

 private:
  struct State {
    std::string text;
    StateEncoder encoder;
  };
  void add_piece(size_t number, const saving::Snapshot::Piece& piece);

  const int64_t rank_, size_;
  const bool is_adapter_;
  std::vector<Section> sections_;
  State common_, own_;
  std::map<std::string, std::string> versions_;
  uint64_t fingerprint_ = 0;
  std::shared_ptr<saving::Snapshot> snapshot_;
  Places places_;
};

}  // namespace roundpipe
