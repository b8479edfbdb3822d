#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/files/file_system.h>
#include <roundpipe/files/safetensors.h>
#include <roundpipe/language/layers.h>
#include <roundpipe/quantise/quantised_folder.h>

namespace roundpipe::language {

// The safetensors files of a model's folder: model.safetensors, or the files that model.safetensors.index.json names.
// Only headers are read when it is opened. Thread safety: any thread.
class WeightFiles {
 public:
  // Of one file of a folder, for a model that `described` describes: a name for messages.
  WeightFiles(const std::string& folder, const std::string& name, std::string described,
              files::FileSystem& files = files::FileSystem::real());
  // `quantization`: how their weights are encoded, see Config; empty: they are plain. Throws std::invalid_argument for
  // a folder without such files, and as quantise::find_stored_weights does, and Error for damaged files, for a tensor
  // that is in two of them and for an index that does not fit them.
  explicit WeightFiles(const std::string& folder, const std::string& quantization = "",
                       files::FileSystem& files = files::FileSystem::real());

  // Those that are encoded.
  const quantise::StoredWeights& encoded() const { return encoded_; }

  // Checks that the folder holds weights of these names and shapes, encoded or in floating-point dtypes that torch
  // computes with, and no others. A second copy of a tied head and the frequencies that old files have are let pass.
  // Throws std::invalid_argument that names what is missing, left over or of another shape or dtype.
  void check(const std::vector<WeightShape>& wanted, bool tied) const;

  // Whether the experts' matrices of a layer are one tensor, and not one for each expert.
  bool has_stacked_experts() const;

  // The dtype of a weight. REQUIRES: check().
  c10::ScalarType dtype(const std::string& name) const;

  // Reads each weight into the host tensor beside its name, cast to that one's dtype, in the order of the files. Only
  // a few megabytes more are held. `progress` is called with the bytes that were read; it may throw.
  // Throws Error if the file ends early. REQUIRES: check().
  void read(const std::vector<std::pair<std::string, at::Tensor>>& into,
            const std::function<void(int64_t)>& progress = {}) const;

  // The parts of an encoded weight, in their format's order, in new memory.
  std::vector<at::Tensor> read_parts(const std::string& name, const std::function<void(int64_t)>& progress = {}) const;

  const std::string& folder() const { return folder_; }

 private:
  struct Stored {
    std::string file;
    files::TensorEntry entry;
  };

  void check_shape(const std::string& name, at::IntArrayRef shape, at::IntArrayRef wanted) const;
  void add_files();
  void add_file(const std::string& name);
  // A tensor as it is stored, in new memory.
  at::Tensor read_stored(const std::string& name) const;
  bool same_values(const Stored& one, const Stored& other) const;

  const std::string folder_;
  const std::string described_;  // the file that says what is wanted
  files::FileSystem& files_;
  std::map<std::string, Stored> tensors_;
  quantise::StoredWeights encoded_;
};

}  // namespace roundpipe::language
