#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <ATen/core/Tensor.h>

#include <roundpipe/checkpoint/manifest.h>
#include <roundpipe/runs/state_value.h>

namespace roundpipe {

// A complete checkpoint on disk. Thread safety: one thread.
class StoredCheckpoint {
 public:
  // A tensor in one of the files.
  struct Place {
    std::string file;
    c10::ScalarType dtype;
    std::vector<int64_t> shape;
  };
  using Section = std::map<std::string, Place>;
  // Tensors to read, by section, name in the files, and the host tensor that takes the values.
  using Destinations = std::map<std::string, std::vector<std::pair<std::string, at::Tensor>>>;

  // Reads the manifest, the state and the headers. Throws Error for one that is incomplete or damaged.
  explicit StoredCheckpoint(const std::string& folder);

  const std::string& folder() const { return folder_; }
  int64_t step() const { return manifest_.step; }
  // The processes that have written it.
  int64_t nodes() const { return manifest_.nodes; }
  const nlohmann::json& state() const { return state_; }
  // The tensors of a section; empty for one that is not there.
  const Section& section(const std::string& name) const;
  // Decodes a value of the state.
  StateValue value(const nlohmann::json& encoded, const std::string& path);

  // Reads tensors and verifies each file that has one of them. Throws Error for a damaged file, std::invalid_argument
  // for another shape.
  void read(const Destinations& destinations) const;

 private:
  std::string small_file(const char* name) const;
  Section header(const std::string& file) const;

  std::string folder_;
  checkpoint::Manifest manifest_;
  nlohmann::json state_;
  std::map<std::string, Section> sections_;
  std::optional<std::map<std::string, at::Tensor>> values_;
};

// The checkpoint itself, or those of a run's folder, newest first.
std::vector<std::string> checkpoints_in(const std::string& folder);

}  // namespace roundpipe
