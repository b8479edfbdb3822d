#include <roundpipe/saving/tensor_files.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <roundpipe/core/error.h>
#include <roundpipe/files/crc32c.h>
#include <roundpipe/files/manifest.h>
#include <roundpipe/files/safetensors.h>

namespace roundpipe::saving {

using files::TensorEntry;

namespace {

constexpr int64_t kPartBytes = 8 << 20;

// Never destroyed: saves go on while the process ends.
const std::map<c10::ScalarType, const char*>& dtype_names() {
  static const auto& names = *new std::map<c10::ScalarType, const char*>{
      {at::kDouble, "F64"},         {at::kFloat, "F32"},        {at::kHalf, "F16"},
      {at::kBFloat16, "BF16"},      {at::kLong, "I64"},         {at::kInt, "I32"},
      {at::kShort, "I16"},          {at::kChar, "I8"},          {at::kByte, "U8"},
      {at::kUInt64, "U64"},         {at::kUInt32, "U32"},       {at::kUInt16, "U16"},
      {at::kBool, "BOOL"},          {at::kComplexFloat, "C64"}, {at::kFloat8_e4m3fn, "F8_E4M3"},
      {at::kFloat8_e5m2, "F8_E5M2"}};
  return names;
}

// Reads one file in order, and keeps its checksum on the way.
class Reader {
 public:
  Reader(files::File& file, const std::function<void(int64_t)>& progress) : file_(file), progress_(progress) {}

  void read(void* data, int64_t bytes) {
    auto* to = static_cast<char*>(data);
    while (bytes > 0) {
      const int64_t part = std::min(bytes, kPartBytes);
      file_.read(at_, to, part);
      checksum_ = files::crc32c(to, static_cast<size_t>(part), checksum_);
      progress_(part);
      at_ += part;
      to += part;
      bytes -= part;
    }
  }
  void skip_to(int64_t offset) {
    while (at_ < offset) {
      buffer_.resize(static_cast<size_t>(std::min(offset - at_, kPartBytes)));
      read(buffer_.data(), static_cast<int64_t>(buffer_.size()));
    }
  }
  uint32_t checksum() const { return checksum_; }

 private:
  files::File& file_;
  const std::function<void(int64_t)>& progress_;
  int64_t at_ = 0;
  uint32_t checksum_ = 0;
  std::vector<char> buffer_;
};

const TensorEntry& entry_of(const std::map<std::string, const TensorEntry*>& entries, const std::string& name,
                            const std::string& path) {
  const auto found = entries.find(name);
  if (found == entries.end()) {
    throw Error(concat("[checkpoint] ", path, " has no tensor '", name,
                       "', expected it; its manifest or its state is of another checkpoint"));
  }
  return *found->second;
}

std::map<std::string, const TensorEntry*> by_name(const files::SafetensorsHeader& header) {
  std::map<std::string, const TensorEntry*> entries;
  for (const TensorEntry& entry : header.tensors) entries[entry.name] = &entry;
  return entries;
}

files::File open_whole(files::FileSystem& files, const std::string& path, const files::FileRecord& record) {
  files::File file = files.open_to_read(path);
  if (file.size() != record.bytes) {
    throw Error(concat("[checkpoint] ", path, " has ", file.size(), " bytes, expected ", record.bytes,
                       "; it is damaged, use another checkpoint"));
  }
  return file;
}

void read_into(Reader& reader, const at::Tensor& to, c10::ScalarType dtype) {
  if (to.scalar_type() == dtype && to.is_contiguous()) {
    return reader.read(to.mutable_data_ptr(), static_cast<int64_t>(to.nbytes()));
  }
  const at::Tensor values = at::empty(to.sizes(), at::TensorOptions().dtype(dtype));
  reader.read(values.mutable_data_ptr(), static_cast<int64_t>(values.nbytes()));
  to.copy_(values);
}

}  // namespace

std::string dtype_name(c10::ScalarType dtype, const std::string& what) {
  const auto found = dtype_names().find(dtype);
  if (found == dtype_names().end()) {
    throw std::invalid_argument(concat("[save_checkpoint] ", what, " is ", c10::toString(dtype),
                                       ", expected a dtype that safetensors has; convert it first"));
  }
  return found->second;
}

c10::ScalarType dtype_of(const TensorEntry& entry, const std::string& path) {
  for (const auto& [dtype, name] : dtype_names()) {
    if (entry.dtype == name) return dtype;
  }
  throw Error(concat("[checkpoint] '", entry.name, "' in ", path, " has the dtype ", entry.dtype,
                     ", expected one that torch has"));
}

std::vector<size_t> shard_counts(const std::vector<int64_t>& tensor_bytes, int64_t most_bytes) {
  std::vector<size_t> counts{0};
  int64_t filled = 0;
  for (const int64_t bytes : tensor_bytes) {
    if (counts.back() > 0 && filled + bytes > most_bytes) {
      counts.push_back(0);
      filled = 0;
    }
    ++counts.back();
    filled += bytes;
  }
  return counts;
}

std::string shard_name(const std::string& stem, size_t index, size_t count) {
  if (count == 1) return stem + ".safetensors";
  std::array<char, 48> part{};
  std::snprintf(part.data(), part.size(), "-%05zu-of-%05zu", index + 1, count);
  return concat(stem, part.data(), ".safetensors");
}

files::SafetensorsLayout lay_out(const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  std::vector<files::TensorDescription> described;
  for (const auto& [name, tensor] : tensors) {
    described.push_back({name, dtype_name(tensor.scalar_type(), "'" + name + "'"), tensor.sizes().vec()});
  }
  return files::lay_out_safetensors(described, {{"format", "pt"}});
}

void write_tensor(const Target& target, const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor dense = tensor.contiguous();
  const auto bytes = static_cast<int64_t>(dense.nbytes());
  if (bytes > 0) target.file->write_at(target.offset, dense.const_data_ptr(), bytes);
}

void read_tensors(const std::string& folder, const files::FileRecord& record,
                  const std::vector<Destination>& destinations, const std::function<void(int64_t)>& progress,
                  files::FileSystem& files) {
  const at::NoGradGuard no_grad;
  const std::string path = files::join(folder, record.name);
  const files::SafetensorsHeader header = files::read_safetensors_header(path, files);
  const std::map<std::string, const TensorEntry*> entries = by_name(header);
  std::map<int64_t, std::pair<at::Tensor, c10::ScalarType>> places;  // by offset
  for (const auto& [name, tensor] : destinations) {
    const TensorEntry& entry = entry_of(entries, name, path);
    if (tensor.sizes() != at::IntArrayRef(entry.shape)) {
      throw std::invalid_argument(concat("[load_checkpoint] '", name, "' has shape ", at::IntArrayRef(entry.shape),
                                         " in ", path, ", expected ", tensor.sizes(),
                                         "; load it into the model that was saved"));
    }
    if (tensor.numel() > 0) places[entry.offset] = {tensor, dtype_of(entry, path)};
  }
  files::File file = open_whole(files, path, record);
  Reader reader(file, progress);
  for (const auto& [offset, taker] : places) {
    reader.skip_to(offset);
    read_into(reader, taker.first, taker.second);
  }
  reader.skip_to(record.bytes);
  if (reader.checksum() != record.crc32c) {
    throw Error(concat("[checkpoint] ", path, " has the checksum ", files::format_crc32c(reader.checksum()),
                       ", expected ", files::format_crc32c(record.crc32c), "; it is damaged, use another checkpoint"));
  }
}

void read_ranges(const std::string& folder, const files::FileRecord& record, const std::vector<Range>& ranges,
                 files::FileSystem& files) {
  const at::NoGradGuard no_grad;
  const std::string path = files::join(folder, record.name);
  const files::SafetensorsHeader header = files::read_safetensors_header(path, files);
  const std::map<std::string, const TensorEntry*> entries = by_name(header);
  files::File file = open_whole(files, path, record);
  for (const Range& range : ranges) {
    const TensorEntry& entry = entry_of(entries, range.name, path);
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype_of(entry, path)));
    if (range.first < 0 || (range.first + range.tensor.numel()) * element_bytes > entry.bytes) {
      throw Error(concat("[checkpoint] '", range.name, "' in ", path, " has ", entry.bytes / element_bytes,
                         " elements, expected those from ", range.first, " to ", range.first + range.tensor.numel(),
                         "; its state is of another checkpoint"));
    }
  }
  for (const Range& range : ranges) {
    if (range.tensor.numel() == 0) continue;
    const TensorEntry& entry = *entries.at(range.name);
    const c10::ScalarType dtype = dtype_of(entry, path);
    const at::Tensor values = range.tensor.scalar_type() == dtype
                                  ? range.tensor
                                  : at::empty(range.tensor.sizes(), at::TensorOptions().dtype(dtype));
    file.read(entry.offset + range.first * static_cast<int64_t>(c10::elementSize(dtype)), values.mutable_data_ptr(),
              static_cast<int64_t>(values.nbytes()));
    if (!values.is_same(range.tensor)) range.tensor.copy_(values);
  }
}

}  // namespace roundpipe::saving
