#include <cstring>
#include <stdexcept>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <roundpipe/core/error.h>
#include <roundpipe/files/json_text.h>
#include <roundpipe/quantise/folder_layout.h>

namespace roundpipe::quantise {

using nlohmann::json;

namespace {

constexpr int64_t kBlockNumbers = 64;
constexpr int64_t kNestedBlock = 256;
constexpr int64_t kMostStateBytes = 1 << 16;
constexpr int64_t kStateBytes = 256;  // that are written: the same for any offset
const char* const kStateOf4Bits = ".quant_state.bitsandbytes__";

// The 16 numbers of the codes.
at::Tensor nf4_map() {
  const at::Tensor pairs = at::arange(0, 16, 2, at::kByte);
  const at::Tensor codes = pairs.mul(16).add(pairs.add(1));
  return find_format("nf4").decode({codes, at::ones({1}, at::kFloat)}, at::kFloat);
}

// The JSON that a tensor of bytes holds.
json read_state(const FolderTensors& tensors, const std::string& name, const std::string& weight) {
  const files::TensorEntry& entry = tensors.at(name, weight, {"U8"});
  if (entry.bytes > kMostStateBytes) {
    refuse_stored(name, "has ", entry.bytes, " bytes, expected at most ", kMostStateBytes, " of JSON");
  }
  const at::Tensor bytes = tensors.read(name).contiguous();
  const auto* const text = static_cast<const char*>(bytes.const_data_ptr());
  json state = files::parse_json({text, static_cast<size_t>(bytes.numel())}, place(name));
  if (!state.is_object()) refuse_stored(name, "holds no object, expected bitsandbytes' state");
  return state;
}

std::string text_of(c10::ScalarType dtype) {
  return dtype == at::kFloat ? "float32" : dtype == at::kHalf ? "float16" : "bfloat16";
}

c10::ScalarType dtype_in(const json& state, const std::string& name) {
  const json& text = files::member(state, "dtype", json::value_t::string, place(name));
  if (text == "float32") return at::kFloat;
  if (text == "bfloat16") return at::kBFloat16;
  if (text == "float16") return at::kHalf;
  refuse_stored(name, "has the dtype '", files::shown(text.get<std::string>()),
                "', expected float32, bfloat16 or float16");
}

void require_number(const json& state, const char* field, int64_t wanted, const std::string& name) {
  const int64_t number = files::count(files::member(state, field, place(name)), field, place(name));
  if (number != wanted) refuse_stored(name, "has ", field, " ", number, ", expected ", wanted);
}

StoredWeight weight_of(const FolderTensors& tensors, const std::string& name, const std::string& state_name) {
  const json state = read_state(tensors, state_name, name);
  require_number(state, "blocksize", kBlockNumbers, state_name);
  const std::vector<int64_t> sizes = sizes_in(files::member(state, "shape", place(state_name)), state_name);
  const bool is_nested = tensors.has(name + ".nested_absmax");
  const Format& format = find_format(is_nested ? "nf4-double" : "nf4");
  require_form(format, name, sizes);
  const int64_t numbers = c10::multiply_integers(sizes), blocks = (numbers + kBlockNumbers - 1) / kBlockNumbers;
  // The bytes may be stored as those of another dtype.
  const files::TensorEntry& codes = tensors.at(name, name, {"U8", "I8", "BF16", "F16", "F32"});
  if (codes.bytes != numbers / 2) {
    refuse_stored(name, "has ", codes.bytes, " bytes of codes, expected ", numbers / 2, " for the shape ",
                  at::IntArrayRef(sizes));
  }
  tensors.at(name + ".quant_map", name, {"F32"}, 16);
  if (!tensors.read(name + ".quant_map").view({-1}).equal(nf4_map())) {
    refuse_stored(name + ".quant_map", "holds other numbers than the 16 of NF4, expected those");
  }
  std::vector<StoredWeight::StoredPart> stored = {{.tensor = name}, {.tensor = name + ".absmax"}};
  if (is_nested) {
    require_number(state, "nested_blocksize", kNestedBlock, state_name);
    const json& offset = files::member(state, "nested_offset", place(state_name));
    if (!offset.is_number()) refuse_stored(state_name, "has no number as nested_offset, expected one");
    tensors.at(name + ".absmax", name, {"U8"}, blocks);
    tensors.at(name + ".nested_absmax", name, {"F32"}, (blocks + kNestedBlock - 1) / kNestedBlock);
    tensors.at(name + ".nested_quant_map", name, {"F32"}, 256);
    stored.push_back({.tensor = name + ".nested_absmax"});
    stored.push_back({.value = at::full({1}, offset.get<double>(), at::kFloat)});
    stored.push_back({.tensor = name + ".nested_quant_map"});
  } else {
    tensors.at(name + ".absmax", name, {"F32"}, blocks);
  }
  return {
      {.format = &format}, sizes, dtype_in(state, state_name), std::move(stored), {name + ".quant_map", state_name}};
}

StoredWeights find_bitsandbytes(const json& config, const FolderTensors& tensors) {
  const auto is_set = [&](const char* flag) {
    const auto found = config.find(flag);
    return found != config.end() && *found == true;
  };
  if (is_set("load_in_8bit") || is_set("_load_in_8bit")) {
    refuse_stored(kConfig,
                  "says load_in_8bit, expected weights of 4 bits: LLM.int8 computes with rounded activations; load the "
                  "weights that were quantised");
  }
  StoredWeights found;
  for (const auto& [name, entry] : tensors.all()) {
    const size_t at = name.find(kStateOf4Bits);
    if (at == std::string::npos) continue;
    const std::string kind = name.substr(at + std::string_view(kStateOf4Bits).size());
    const std::string weight = name.substr(0, at);
    if (kind != "nf4") refuse_stored(weight, "is stored as '", files::shown(kind), "', expected nf4");
    found.emplace(weight, weight_of(tensors, weight, name));
  }
  return found;
}

at::Tensor state_of(const EncodedTensor& weight) {
  const std::vector<at::Tensor>& parts = weight.parts();
  if (parts[0].is_meta()) return at::empty({kStateBytes}, parts[0].options());
  nlohmann::ordered_json state = {{"quant_type", "nf4"},
                                  {"blocksize", kBlockNumbers},
                                  {"dtype", text_of(weight.encoding().dtype)},
                                  {"shape", weight.sizes()}};
  if (parts.size() > 2) {
    state["nested_blocksize"] = kNestedBlock;
    state["nested_dtype"] = "float32";
    state["nested_offset"] = parts[3].item<float>();
  }
  std::string text = state.dump();
  text.resize(kStateBytes, ' ');
  const at::Tensor bytes = at::empty({kStateBytes}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::vector<std::pair<std::string, at::Tensor>> store_bitsandbytes(const std::string& name,
                                                                   const EncodedTensor& weight) {
  const std::vector<at::Tensor>& parts = weight.parts();
  const at::Tensor map = parts[0].is_meta() ? at::empty({16}, parts[0].options().dtype(at::kFloat)) : nf4_map();
  std::vector<std::pair<std::string, at::Tensor>> stored = {{name, parts[0].view({-1, 1})},
                                                            {name + ".absmax", parts[1]},
                                                            {name + ".quant_map", map},
                                                            {concat(name, kStateOf4Bits, "nf4"), state_of(weight)}};
  if (parts.size() > 2) {
    stored.emplace_back(name + ".nested_absmax", parts[2]);
    stored.emplace_back(name + ".nested_quant_map", parts[4]);
  }
  return stored;
}

nlohmann::ordered_json config_of(const Format& format, c10::ScalarType dtype, const std::vector<std::string>& kept) {
  return {{"load_in_4bit", true},
          {"load_in_8bit", false},
          {"bnb_4bit_quant_type", "nf4"},
          {"bnb_4bit_use_double_quant", format.name() == "nf4-double"},
          {"bnb_4bit_compute_dtype", text_of(dtype)},
          {"bnb_4bit_quant_storage", "uint8"},
          {"llm_int8_skip_modules", kept}};
}

}  // namespace

FolderLayout bitsandbytes_layout() {
  return {"bitsandbytes", {"nf4", "nf4-double"}, find_bitsandbytes, store_bitsandbytes, config_of};
}

}  // namespace roundpipe::quantise
