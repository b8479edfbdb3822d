#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/files/file_system.h>
#include <roundpipe/files/output_file.h>
#include <roundpipe/files/safetensors.h>

namespace roundpipe::saving {

// Tensors in the files of a checkpoint. Thread safety: any thread.

// The name of a dtype in safetensors. Throws std::invalid_argument, naming `what`, for one that the format lacks.
std::string dtype_name(c10::ScalarType dtype, const std::string& what);

// torch's dtype of a tensor in the file at `path`. Throws Error for one that torch lacks.
c10::ScalarType dtype_of(const files::TensorEntry& entry, const std::string& path);

// Cuts tensors of these sizes, in order, into files of at most `most_bytes` each; a larger tensor has a file of its
// own. Returns the number of tensors in each file: at least one file, which is empty if there are none.
std::vector<size_t> shard_counts(const std::vector<int64_t>& tensor_bytes, int64_t most_bytes);
// "model-00002-of-00005.safetensors" of index 1 of 5; "model.safetensors" of a single one.
std::string shard_name(const std::string& stem, size_t index, size_t count);

// The layout of a safetensors file of these tensors, which transformers and PEFT read. Throws as dtype_name() does.
files::SafetensorsLayout lay_out(const std::vector<std::pair<std::string, at::Tensor>>& tensors);

// The place of a tensor's first byte.
struct Target {
  files::OutputFile* file = nullptr;
  int64_t offset = 0;
};

// Writes the values of a host tensor in the order of its dimensions, whatever its strides. Blocks.
void write_tensor(const Target& target, const at::Tensor& tensor);

// A tensor in one of a checkpoint's files.
struct StoredTensor {
  std::string file;
  c10::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  int64_t bytes = 0;
};
// Those of one kind of files, by their names there; and of all, by the kind: "model", "optimizer", ...
using StoredSection = std::map<std::string, StoredTensor>;
using StoredSections = std::map<std::string, StoredSection>;

// A tensor of a file, by its name there, and the host tensor that takes its values, cast to that one's dtype.
using Destination = std::pair<std::string, at::Tensor>;

// Reads a safetensors file of `folder` once, from its first byte to its last, puts tensors where `destinations` say,
// and compares the file's checksum with `record`'s. No second copy is made, except of a tensor whose dtype or strides
// differ from the file's. `progress` is called with the bytes of each part that was read; it may throw.
// Throws Error for a damaged file or one that lacks a destination's name, and std::invalid_argument for another shape.
// Names and shapes are checked before anything is written to; a wrong checksum is found only at the end.
void read_tensors(const std::string& folder, const files::FileRecord& record,
                  const std::vector<Destination>& destinations, const std::function<void(int64_t)>& progress,
                  files::FileSystem& files = files::FileSystem::real());

// Some elements of a tensor of a file, from the one numbered `first` in the file's order on, and the contiguous host
// tensor that takes them, cast to its dtype.
struct Range {
  std::string name;
  int64_t first = 0;
  at::Tensor tensor;
};

// Reads only these ranges of a safetensors file of `folder`, so the file's checksum is not compared: read_tensors()
// without destinations does that. Throws Error for a file that lacks a range. Names and ends are checked before
// anything is written to.
void read_ranges(const std::string& folder, const files::FileRecord& record, const std::vector<Range>& ranges,
                 files::FileSystem& files = files::FileSystem::real());

}  // namespace roundpipe::saving
