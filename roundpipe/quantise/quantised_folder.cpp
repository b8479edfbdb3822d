#include <roundpipe/quantise/quantised_folder.h>

#include <algorithm>
#include <set>

#include <roundpipe/files/json_text.h>
#include <roundpipe/quantise/folder_layout.h>

namespace roundpipe::quantise {

using at::Tensor;

namespace {

const std::vector<FolderLayout>& layouts() {
  static const std::vector<FolderLayout> all = {bitsandbytes_layout(), mxfp4_layout(), compressed_layout(),
                                                fp8_layout()};
  return all;
}

const FolderLayout& layout_of(const Format& format) {
  for (const FolderLayout& each : layouts()) {
    if (std::ranges::find(each.formats, format.name()) != each.formats.end()) return each;
  }
  throw std::invalid_argument(concat("[quantised folder] weights of ", format.name(),
                                     " are only read, expected one of ",
                                     "the formats that are written; see format_names"));
}

}  // namespace

StoredWeights find_stored_weights(std::string_view text, const std::vector<files::TensorEntry>& tensors,
                                  const ReadTensor& read) {
  const std::string where = place(kConfig);
  const nlohmann::json config = files::parse_json(text, where);
  if (!config.is_object()) refuse_stored(kConfig, "is no object, expected one");
  const auto& method = files::member(config, "quant_method", nlohmann::json::value_t::string, where);
  const FolderTensors folder(tensors, read);
  const auto layout = std::ranges::find_if(layouts(), [&](const FolderLayout& each) { return method == each.method; });
  if (layout == layouts().end()) {
    refuse_stored(
        kConfig, "has the quant_method '", files::shown(method.get<std::string>()),
        "', expected bitsandbytes, mxfp4, compressed-tensors or fp8; load the weights that were quantised, or "
        "save them dequantised");
  }
  StoredWeights found = layout->find(config, folder);
  if (found.empty()) {
    refuse_stored(kConfig, "says ", method.get<std::string>(),
                  ", and no tensor is stored so, expected encoded weights; remove it from config.json if the weights "
                  "are plain");
  }
  std::set<std::string> claimed;
  for (const auto& [weight, stored] : found) {
    for (const std::string& name : stored.tensors()) claimed.insert(name);
  }
  static const std::set<std::string> encoded = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8"};
  for (const auto& [name, entry] : folder.all()) {
    if (encoded.contains(entry.dtype) && !claimed.contains(name)) {
      refuse_stored(name, "has numbers of ", entry.dtype, " and belongs to no weight that is encoded as ",
                    method.dump(), " does, expected its scales beside it");
    }
  }
  return found;
}

std::vector<std::pair<std::string, Tensor>> stored_tensors(const std::string& name, const EncodedTensor& weight) {
  return layout_of(*weight.encoding().format).store(name, weight);
}

std::string stored_config(const Format& format, c10::ScalarType dtype, const std::vector<std::string>& kept) {
  const FolderLayout& layout = layout_of(format);
  nlohmann::ordered_json config = layout.config(format, dtype, kept);
  config["quant_method"] = layout.method;
  return files::print_json(config, kConfig);
}

}  // namespace roundpipe::quantise
