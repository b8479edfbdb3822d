#include <roundpipe/language/model_folder.h>

#include <algorithm>
#include <stdexcept>

#include <roundpipe/core/error.h>
#include <roundpipe/files/json_text.h>
#include <roundpipe/files/output_file.h>
#include <roundpipe/language/config.h>
#include <roundpipe/saving/tensor_files.h>

namespace roundpipe::language {

using files::EntryKind;
using files::FileSystem;
using files::join;
using nlohmann::ordered_json;

namespace {

constexpr int64_t kMostCopiedBytes = 1 << 30;
constexpr int kIndent = 2;

using Weights = std::vector<std::pair<std::string, at::Tensor>>;

// What belongs to a model beside its weights and its config.json.
bool is_copied(const std::string& name) {
  static const char* const kNames[] = {"generation_config.json",
                                       "special_tokens_map.json",
                                       "added_tokens.json",
                                       "vocab.json",
                                       "merges.txt",
                                       "vocab.txt"};
  if (std::ranges::find(kNames, name) != std::end(kNames)) return true;
  return name.starts_with("tokenizer") || name.starts_with("chat_template") || name.ends_with(".tiktoken");
}

void write_all_weights(FileSystem& files, const std::string& folder, const Weights& weights, int64_t most_bytes,
                       const WrittenValue& written) {
  std::vector<int64_t> sizes;
  for (const auto& [name, tensor] : weights) sizes.push_back(static_cast<int64_t>(tensor.nbytes()));
  const std::vector<size_t> counts = saving::shard_counts(sizes, most_bytes);
  ordered_json map = ordered_json::object();
  int64_t bytes = 0;
  auto first = weights.begin();
  for (size_t i = 0; i < counts.size(); ++i) {
    const std::string name = saving::shard_name("model", i, counts.size());
    const Weights part(first, first + static_cast<std::ptrdiff_t>(counts[i]));
    first += static_cast<std::ptrdiff_t>(counts[i]);
    write_weights(folder, name, part, written, files);
    for (const auto& [weight, tensor] : part) {
      map[weight] = name;
      bytes += static_cast<int64_t>(tensor.nbytes());
    }
  }
  if (counts.size() == 1) return;
  const ordered_json index = {{"metadata", {{"total_size", bytes}}}, {"weight_map", map}};
  write_text(folder, "model.safetensors.index.json", index.dump(kIndent) + "\n", files);
}

void write_config(FileSystem& files, const std::string& folder, const std::string& source, c10::ScalarType dtype) {
  const std::string path = join(source, "config.json");
  ordered_json config = ordered_json::parse(files.read_small(path, kMostCopiedBytes));
  config.erase("torch_dtype");
  config["dtype"] = dtype_text(dtype);
  write_text(folder, "config.json", config.dump(kIndent) + "\n", files);
}

}  // namespace

void check_model_folder(const std::string& folder, bool replace, FileSystem& files) {
  const EntryKind kind = files.look(folder).kind;
  const bool free = kind == EntryKind::kNothing || (kind == EntryKind::kFolder && files.list(folder).empty());
  if (free || (replace && kind == EntryKind::kFolder)) return;
  throw std::invalid_argument(concat("[language model] there is something at ", folder,
                                     ", expected nothing or an empty folder; name another one, or ask to replace it"));
}

void write_text(const std::string& folder, const std::string& name, const std::string& text, FileSystem& files) {
  files::OutputFile file(files, folder, name, static_cast<int64_t>(text.size()));
  if (!text.empty()) file.write_at(0, text.data(), static_cast<int64_t>(text.size()));
  file.finish();
}

void write_weights(const std::string& folder, const std::string& name, const Weights& weights,
                   const WrittenValue& written, FileSystem& files) {
  const files::SafetensorsLayout layout = saving::lay_out(weights);
  files::OutputFile file(files, folder, name, layout.file_bytes);
  file.write_at(0, layout.header.data(), static_cast<int64_t>(layout.header.size()));
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto& [weight, tensor] = weights[i];
    saving::write_tensor({&file, layout.tensors[i].offset}, written ? written(weight, tensor) : tensor);
  }
  file.finish();
}

void write_whole_folder(const std::string& given, bool replace,
                        const std::function<void(const std::string& hidden)>& write, FileSystem& files) {
  std::string folder = given;
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  check_model_folder(folder, replace, files);
  const std::string parent = files::parent_of(folder);
  const std::string name = folder.substr(folder.find_last_of('/') + 1);
  const std::string hidden = join(parent, "." + name + ".writing");
  files.make_folders(parent);
  files.remove_tree(hidden);
  files.make_folder(hidden);
  write(hidden);
  files.sync_folder(hidden);
  const bool replaces = files.look(folder).kind == EntryKind::kFolder && !files.list(folder).empty();
  if (!replaces) {
    files.rename(hidden, folder);
  } else if (!files.exchange(hidden, folder)) {
    const std::string old = join(parent, "." + name + ".replaced");
    files.remove_tree(old);
    files.rename(folder, old);
    files.rename(hidden, folder);
    files.remove_tree(old);
  }
  files.sync_folder(parent);
  files.remove_tree(hidden);
}

void write_model_folder(const std::string& folder, const std::string& source, const Weights& weights,
                        const ModelFolderOptions& options, const WrittenValue& written, FileSystem& files) {
  write_whole_folder(
      folder, options.replace,
      [&](const std::string& hidden) {
        write_all_weights(files, hidden, weights, options.most_file_bytes, written);
        write_config(files, hidden, source, weights.front().second.scalar_type());
        for (const std::string& each : files.list(source)) {
          if (!is_copied(each) || files.look(join(source, each)).kind == EntryKind::kFolder) continue;
          write_text(hidden, each, files.read_small(join(source, each), kMostCopiedBytes), files);
        }
      },
      files);
}

}  // namespace roundpipe::language
