#include <roundpipe/language/weight_files.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <stdexcept>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <roundpipe/core/error.h>
#include <roundpipe/files/json_text.h>
#include <roundpipe/saving/tensor_files.h>

namespace roundpipe::language {

using files::TensorEntry;

namespace {

constexpr int64_t kPartBytes = 8 << 20;
constexpr int64_t kMostIndexBytes = 256 << 20;
const char* const kSingle = "model.safetensors";
const char* const kIndex = "model.safetensors.index.json";
const char* const kTiedHead = "lm_head.weight";
const char* const kTiedTo = "model.embed_tokens.weight";

// Those that weights may have.
std::optional<c10::ScalarType> floating(const std::string& name) {
  if (name == "F32") return at::kFloat;
  if (name == "BF16") return at::kBFloat16;
  if (name == "F16") return at::kHalf;
  if (name == "F64") return at::kDouble;
  return std::nullopt;
}

// Of old Llama files; transformers computes them anew.
bool is_ignored(const std::string& name) { return name.ends_with(".rotary_emb.inv_freq"); }

template <typename Names>
std::string first_of(const Names& names) {
  std::string text;
  size_t shown = 0;
  for (const std::string& name : names) {
    if (shown++ == 3) return concat(text, " and ", names.size() - 3, " more");
    text += concat(text.empty() ? "'" : ", '", files::shown(name), "'");
  }
  return text;
}

void read_casting(files::File& file, const TensorEntry& entry, c10::ScalarType dtype, const at::Tensor& to,
                  const std::function<void(int64_t)>& progress) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const bool direct = to.scalar_type() == dtype;
  const at::Tensor flat = to.view({-1});
  std::vector<char> buffer;
  for (int64_t at = 0; at < entry.bytes;) {
    const int64_t bytes = std::min(kPartBytes, entry.bytes - at);
    const at::Tensor part = flat.narrow(0, at / element, bytes / element);
    if (direct) {
      file.read(entry.offset + at, part.mutable_data_ptr(), bytes);
    } else {
      buffer.resize(static_cast<size_t>(bytes));
      file.read(entry.offset + at, buffer.data(), bytes);
      part.copy_(at::from_blob(buffer.data(), {bytes / element}, at::TensorOptions(dtype)));
    }
    if (progress) progress(bytes);
    at += bytes;
  }
}

}  // namespace

WeightFiles::WeightFiles(const std::string& folder, const std::string& name, std::string described,
                         files::FileSystem& files)
    : folder_(folder), described_(std::move(described)), files_(files) {
  if (files.look(files::join(folder, name)).kind == files::EntryKind::kNothing) {
    throw std::invalid_argument(
        concat("[language model] there is no ", name, " in ", folder, ", expected it beside ", described_));
  }
  add_file(name);
}

WeightFiles::WeightFiles(const std::string& folder, const std::string& quantization, files::FileSystem& files)
    : folder_(folder), described_("config.json"), files_(files) {
  add_files();
  if (quantization.empty()) return;
  std::vector<TensorEntry> entries;
  for (const auto& [name, stored] : tensors_) entries.push_back(stored.entry);
  encoded_ = quantise::find_stored_weights(quantization, entries,
                                           [this](const std::string& name) { return read_stored(name); });
}

void WeightFiles::add_files() {
  const std::string& folder = folder_;
  const std::string index_path = files::join(folder, kIndex);
  const auto there = [&](const std::string& path) {
    const files::EntryKind kind = files_.look(path).kind;
    return kind == files::EntryKind::kFile || kind == files::EntryKind::kLink;
  };
  if (there(files::join(folder, kSingle))) {
    add_file(kSingle);
    return;
  }
  if (!there(index_path)) {
    throw std::invalid_argument(concat("[language model] ", folder, " has neither ", kSingle, " nor ", kIndex,
                                       ", expected one of them; save the model with safetensors"));
  }
  const std::string where = "[language model] " + index_path;
  const nlohmann::json index = files::parse_json(files_.read_small(index_path, kMostIndexBytes), index_path);
  const nlohmann::json& map = files::member(index, "weight_map", nlohmann::json::value_t::object, index_path);
  std::set<std::string> names;
  for (const auto& [name, file] : map.items()) {
    const bool plain = file.is_string() && !file.get<std::string>().empty() &&
                       file.get<std::string>().find('/') == std::string::npos && file.get<std::string>()[0] != '.';
    if (!plain) throw Error(concat(where, " has no plain file name for '", files::shown(name), "', expected one"));
    names.insert(file.get<std::string>());
  }
  for (const std::string& name : names) add_file(name);
  for (const auto& [name, file] : map.items()) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end() || found->second.file != file.get<std::string>()) {
      throw Error(concat(where, " says that '", files::shown(name), "' is in ", files::shown(file.get<std::string>()),
                         ", which has it not; download the model again"));
    }
  }
}

void WeightFiles::add_file(const std::string& name) {
  const std::string path = files::join(folder_, name);
  for (TensorEntry& entry : files::read_safetensors_header(path, files_).tensors) {
    const std::string tensor = entry.name;
    const auto [place, is_new] = tensors_.emplace(tensor, Stored{name, std::move(entry)});
    if (!is_new) {
      throw Error(concat("[language model] '", files::shown(tensor), "' is in ", place->second.file, " and in ", name,
                         " of ", folder_, ", expected it once; download the model again"));
    }
  }
}

void WeightFiles::check_shape(const std::string& name, at::IntArrayRef shape, at::IntArrayRef wanted) const {
  if (shape == wanted) return;
  throw std::invalid_argument(concat("[language model] '", name, "' of ", folder_, " has the shape ", shape,
                                     ", expected ", wanted, " by ", described_,
                                     "; use the one that belongs to these weights"));
}

void WeightFiles::check(const std::vector<WeightShape>& wanted, bool tied) const {
  std::vector<std::string> missing;
  std::set<std::string> names;
  for (const auto& [name, shape] : wanted) {
    names.insert(name);
    if (const auto encoded = encoded_.find(name); encoded != encoded_.end()) {
      check_shape(name, encoded->second.sizes(), shape);
      for (const std::string& tensor : encoded->second.tensors()) names.insert(tensor);
      continue;
    }
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) {
      missing.push_back(name);
      continue;
    }
    const TensorEntry& entry = found->second.entry;
    check_shape(name, entry.shape, shape);
    if (!floating(entry.dtype)) {
      throw std::invalid_argument(concat("[language model] '", name, "' of ", folder_, " has the dtype ", entry.dtype,
                                         ", expected F32, BF16, F16 or F64; use weights that are not quantised"));
    }
  }
  if (!missing.empty()) {
    throw std::invalid_argument(concat("[language model] ", folder_, " lacks ", first_of(missing), ", which ",
                                       described_, " asks for; use the files that belong to it"));
  }
  std::vector<std::string> others;
  for (const auto& [name, stored] : tensors_) {
    if (names.count(name) != 0 || is_ignored(name)) continue;
    if (tied && name == kTiedHead && same_values(stored, tensors_.at(kTiedTo))) continue;
    others.push_back(name);
  }
  if (others.empty()) return;
  throw std::invalid_argument(
      concat("[language model] ", folder_, " holds ", first_of(others), ", which ", described_, " does not ask for",
             others.front() == kTiedHead ? ", and which differs from the embedding that it is tied to" : "",
             "; use the one that belongs to these weights"));
}

bool WeightFiles::same_values(const Stored& one, const Stored& other) const {
  if (one.entry.dtype != other.entry.dtype || one.entry.shape != other.entry.shape) return false;
  files::File first = files_.open_to_read(files::join(folder_, one.file));
  files::File second = files_.open_to_read(files::join(folder_, other.file));
  std::vector<char> here(kPartBytes), there(kPartBytes);
  for (int64_t at = 0; at < one.entry.bytes; at += kPartBytes) {
    const int64_t bytes = std::min(kPartBytes, one.entry.bytes - at);
    first.read(one.entry.offset + at, here.data(), bytes);
    second.read(other.entry.offset + at, there.data(), bytes);
    if (std::memcmp(here.data(), there.data(), static_cast<size_t>(bytes)) != 0) return false;
  }
  return true;
}

bool WeightFiles::has_stacked_experts() const {
  const auto is_stack = [](const auto& each) { return each.first.ends_with(".experts.down_proj"); };
  return std::ranges::any_of(tensors_, is_stack) || std::ranges::any_of(encoded_, is_stack);
}

at::Tensor WeightFiles::read_stored(const std::string& name) const {
  const Stored& stored = tensors_.at(name);
  const std::string path = files::join(folder_, stored.file);
  const at::Tensor tensor = at::empty(stored.entry.shape, at::TensorOptions(saving::dtype_of(stored.entry, path)));
  files_.open_to_read(path).read(stored.entry.offset, tensor.mutable_data_ptr(), stored.entry.bytes);
  return tensor;
}

std::vector<at::Tensor> WeightFiles::read_parts(const std::string& name,
                                                const std::function<void(int64_t)>& progress) const {
  const at::NoGradGuard no_grad;
  const quantise::StoredWeight& weight = encoded_.at(name);
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < weight.stored_parts().size(); ++i) {
    const std::string& tensor = weight.stored_parts()[i].tensor;
    parts.push_back(weight.part(i, tensor.empty() ? at::Tensor() : read_stored(tensor)));
    if (progress && !tensor.empty()) progress(tensors_.at(tensor).entry.bytes);
  }
  return parts;
}

c10::ScalarType WeightFiles::dtype(const std::string& name) const { return *floating(tensors_.at(name).entry.dtype); }

void WeightFiles::read(const std::vector<std::pair<std::string, at::Tensor>>& into,
                       const std::function<void(int64_t)>& progress) const {
  const at::NoGradGuard no_grad;
  std::vector<std::pair<const Stored*, at::Tensor>> order;
  for (const auto& [name, tensor] : into) order.emplace_back(&tensors_.at(name), tensor);
  std::ranges::sort(order, [](const auto& one, const auto& other) {
    return std::tie(one.first->file, one.first->entry.offset) < std::tie(other.first->file, other.first->entry.offset);
  });
  std::optional<files::File> file;
  for (const auto& [stored, tensor] : order) {
    const std::string path = files::join(folder_, stored->file);
    if (!file || file->path() != path) {
      file.reset();
      file.emplace(files_.open_to_read(path));
    }
    read_casting(*file, stored->entry, *floating(stored->entry.dtype), tensor.detach(), progress);
  }
}

}  // namespace roundpipe::language
