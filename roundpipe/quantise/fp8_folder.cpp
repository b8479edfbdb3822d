#include <set>

#include <roundpipe/core/error.h>
#include <roundpipe/files/json_text.h>
#include <roundpipe/quantise/folder_layout.h>

namespace roundpipe::quantise {

using nlohmann::json;

namespace {

const std::string kInverse = "_scale_inv", kStored = "F8_E4M3";

// X, and X_scale_inv with a number for each block of matrices, or one for the whole tensor. `block`: rows and columns
// of one; empty: the tensor.
StoredWeight weight_of(const FolderTensors& tensors, const std::string& weight, const std::vector<int64_t>& block) {
  const std::vector<int64_t> sizes = tensors.at(weight, weight, {kStored}).shape;
  if (sizes.size() < 2) refuse_stored(weight, "has the shape ", at::IntArrayRef(sizes), ", expected rows of codes");
  const Format& format = find_format(block.empty() ? "fp8" : "fp8-128");
  require_form(format, weight, sizes);
  const int64_t rows = sizes[sizes.size() - 2], matrices = c10::multiply_integers(sizes.begin(), sizes.end() - 2);
  StoredWeight::StoredPart scales{.tensor = weight + kInverse};
  int64_t count = 1;
  if (block.empty()) {
    scales.rows_of_scale = 0;
  } else {
    scales.rows_of_scale = block[0];
    count = matrices * ((rows + block[0] - 1) / block[0]) * (sizes.back() / block[1]);
  }
  tensors.at(scales.tensor, weight, {"F32", "BF16", "F16"}, count);
  std::vector<std::string> beside;
  // With which an engine for inference rounds activations.
  const std::string activations = weight.substr(0, weight.rfind("weight")) + "activation_scale";
  if (tensors.has(activations)) beside.push_back(activations);
  return {{.format = &format}, sizes, std::nullopt, {{.tensor = weight}, scales}, beside};
}

StoredWeights find_fp8(const json& config, const FolderTensors& tensors) {
  constexpr int64_t kColumns = 128, kMostRows = int64_t{1} << 20;
  // Beside those that are read, none of which changes the weights' numbers.
  static const std::set<std::string> known = {
      "activation_scheme", "dequantize", "expert_dtype",     "fmt", "quant_method", "modules_to_not_convert",
      "ignored_layers",    "scale_fmt",  "weight_block_size"};
  for (const auto& [name, value] : config.items()) {
    if (!known.contains(name) && !value.empty()) {
      refuse_stored(concat(kConfig, ".", files::shown(name)), "is set, expected 8-bit weights alone");
    }
  }
  const auto require = [&](const char* field, const char* wanted) {
    if (config.contains(field) && config[field] != wanted) {
      refuse_stored(concat(kConfig, ".", field), "is ", config[field].dump(), ", expected \"", wanted, "\"");
    }
  };
  require("fmt", "e4m3");
  require("scale_fmt", "float");
  require("expert_dtype", "fp8");
  std::vector<int64_t> block;
  const auto stored = config.find("weight_block_size");
  if (stored == config.end()) {
    block = {kColumns, kColumns};  // transformers' default
  } else if (!stored->is_null()) {
    block = sizes_in(*stored, place(kConfig));
    if (block.size() != 2 || block[0] < 1 || block[0] > kMostRows || block[1] != kColumns) {
      refuse_stored(concat(kConfig, ".weight_block_size"), "is ", at::IntArrayRef(block), ", expected rows and ",
                    kColumns, " columns");
    }
  }
  StoredWeights found;
  for (const auto& [name, entry] : tensors.all()) {
    if (entry.dtype == kStored) found.emplace(name, weight_of(tensors, name, block));
  }
  return found;
}

}  // namespace

FolderLayout fp8_layout() { return {"fp8", {}, find_fp8, nullptr, nullptr}; }

}  // namespace roundpipe::quantise
