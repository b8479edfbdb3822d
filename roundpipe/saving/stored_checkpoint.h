#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/mutex.h>
#include <roundpipe/files/manifest.h>
#include <roundpipe/saving/state_value.h>
#include <roundpipe/saving/tensor_files.h>

namespace roundpipe {

// A complete checkpoint on disk, of programs in C++ or Python, of one process or of several nodes.
//
// Whatever is wrong with its files is a files::DamagedCheckpoint that names one: a file that is not there, that
// the disk does not read back, whose checksum differs, or whose contents are not those of a checkpoint. What the states
// say is checked when it is opened, so that reading them does not fail later. Memory: bounded by the sizes of the
// files. Thread safety: one thread.
class StoredCheckpoint {
 public:
  using Section = saving::StoredSection;
  using Sections = saving::StoredSections;
  // Tensors to read, by section, name in the files, and the host tensor that takes the values.
  using Destinations = std::map<std::string, std::vector<std::pair<std::string, at::Tensor>>>;
  // The same by file.
  using FileDestinations = std::map<std::string, std::vector<saving::Destination>>;
  using FileRanges = std::map<std::string, std::vector<saving::Range>>;

  // What of it is of interest; the other files are not looked into.
  enum class Scope { kAll, kWeights };
  // For the rank: what is not of one of several nodes.
  static constexpr int64_t kOfAll = -1;

  // Reads the manifest, the states and the headers.
  explicit StoredCheckpoint(const std::string& folder, Scope scope = Scope::kAll);

  const std::string& folder() const { return folder_; }
  const files::Manifest& manifest() const { return manifest_; }
  int64_t step() const { return manifest_.step; }
  // The processes that have written it.
  int64_t nodes() const { return manifest_.nodes; }
  // What state.json holds or, with a rank, that rank's; and its text, which has the order of names.
  const nlohmann::json& state(int64_t rank = kOfAll) const;
  const std::string& state_text(int64_t rank = kOfAll) const;
  // The tensors of a section that all nodes have together; empty for one that is not there.
  const Section& section(const std::string& name) const;
  // All sections or, with a rank, those of which each rank has its own.
  const Sections& sections(int64_t rank = kOfAll) const;

  // A stored tensor of an optimizer's state, of some elements of its parameter, counted in the order of memory.
  struct Part {
    saving::StoredTensor tensor;
    int64_t first = 0;
    std::optional<int64_t> last;  // the one after; none: all elements, in the order of the parameter's dimensions

    // How many elements the tensor itself has.
    int64_t count() const { return c10::multiply_integers(tensor.shape); }
  };
  // The optimizer's tensors by name, each in the order of its elements. parts_of() throws damage for one that is not
  // there, as the state says it is.
  const std::map<std::string, std::vector<Part>>& parts() const { return parts_; }
  const std::vector<Part>& parts_of(const std::string& key) const;
  // A fused optimizer's counters of a parameter; null if there are none.
  const nlohmann::json* counters(const std::string& name) const;
  // See ModelOptimizer::last_norm.
  std::optional<double> last_norm() const;
  // The strides of a parameter that several nodes have cut, if it was not contiguous.
  std::optional<std::vector<int64_t>> strides(const std::string& name) const;
  // The shape of a trained parameter; one dimension if the weight files have it under another name.
  std::vector<int64_t> shape(const std::string& name) const;

  // Decodes a value of a state.
  StateValue value(const nlohmann::json& encoded, const std::string& path, int64_t rank = kOfAll);
  // A fingerprint of such a value: the same for the same values in the states of any ranks.
  uint64_t fingerprint(const nlohmann::json& encoded, int64_t rank = kOfAll);

  // Reads tensors, several files at a time, and verifies each file that has one of them. Throws std::invalid_argument
  // for another shape, before anything is read. Interruptible.
  void read(const Destinations& destinations) const;
  void read_files(const FileDestinations& destinations) const;
  // Reads parts of tensors, and verifies nothing.
  void read_ranges(const FileRanges& ranges) const;

  // Verifies the files of these sections. To be called before what their headers say is taken for a mistake of the
  // caller, who has given another model.
  void require_whole(const std::vector<std::string>& sections) const;
  // Verifies what was not read as a whole, so that no file's damage goes unnoticed. `rank` of `size` processes that do
  // this together verifies its share.
  void verify_rest(int64_t rank = 0, int64_t size = 1) const;

 private:
  std::string small_file(const std::string& name) const;
  void add_section(const std::string& file);
  Section header(const std::string& file) const;
  Section state_tensor_places(int64_t rank) const;
  void add_parts(int64_t rank);
  void check_state_of(int64_t rank, const nlohmann::json& state) const;
  // The tensors that the values of a state refer to, read and verified the first time.
  const std::map<std::string, at::Tensor>& state_tensors(int64_t rank);
  std::string path_of(const std::string& file) const;
  const files::FileRecord& record_of(const std::string& file) const;
  const saving::StoredTensor& place(const std::string& section, const std::string& name) const;

  using Progress = std::function<void(int64_t)>;
  void check_shape(const std::string& file, const std::string& name, const at::Tensor& taker) const;
  void read_file(const std::string& file, const std::vector<saving::Destination>& destinations,
                 const Progress& progress) const;
  void verify(const std::vector<files::FileRecord>& records) const;
  bool is_whole(const std::string& file) const;
  void note_whole(const std::string& file) const;

  mutable Mutex mutex_;
  mutable std::set<std::string> whole_ ROUNDPIPE_GUARDED_BY(mutex_);  // files whose checksums were found right
  const std::string folder_;
  const Scope scope_;
  files::Manifest manifest_;
  std::string text_;
  nlohmann::json state_;
  Sections sections_;
  std::map<std::string, std::vector<Part>> parts_;
  // By rank, of several nodes.
  std::vector<std::string> texts_of_ranks_;
  std::vector<nlohmann::json> states_of_ranks_;
  std::vector<Sections> sections_of_ranks_;
  std::map<int64_t, std::map<std::string, at::Tensor>> values_;  // by rank
};

// The checkpoint itself, or those of a run's folder that are complete, newest first.
std::vector<std::string> checkpoints_in(const std::string& folder);

}  // namespace roundpipe
