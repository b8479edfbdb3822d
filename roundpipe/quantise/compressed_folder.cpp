#include <set>
#include <stdexcept>

#include <roundpipe/core/error.h>
#include <roundpipe/files/json_text.h>
#include <roundpipe/quantise/folder_layout.h>

namespace roundpipe::quantise {

using nlohmann::json;

namespace {

constexpr int64_t kWordBits = 32;
const std::string kScale = "_scale", kPacked = "pack-quantized", kFloat = "float-quantized";

// A group's weights.
struct Group {
  const Format* format;
  bool has_scale_of_tensor = false;

  bool operator==(const Group&) const = default;
};

bool is_there(const json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && !found->is_null();
}

// Throws if its format is none of ours, or if something else is quantised.
Group group_of(const std::string& name, const json& group, const std::string& stored_as) {
  const std::string where = concat(kConfig, ".config_groups.", files::shown(name));
  if (!group.is_object()) refuse_stored(where, "is no object, expected one");
  for (const char* other : {"input_activations", "output_activations"}) {
    if (is_there(group, other)) {
      refuse_stored(where, "has ", other,
                    ", expected quantised weights alone: activations are not rounded here; load the weights that were "
                    "quantised");
    }
  }
  if (is_there(group, "format") && group["format"] != stored_as) {
    refuse_stored(where, "has the format ", group["format"].dump(), ", expected ", stored_as, " as the others");
  }
  const json& weights = files::member(group, "weights", json::value_t::object, place(where));
  const auto require = [&](const char* field, const std::vector<json>& wanted) {
    const json& value = files::member(weights, field, place(where + ".weights"));
    std::string expected;
    for (const json& each : wanted) {
      if (value == each) return value;
      expected += (expected.empty() ? "" : " or ") + each.dump();
    }
    refuse_stored(where, "has weights of ", field, " ", value.dump(), ", expected ", expected);
  };
  const bool is_float = stored_as == kFloat;
  require("type", {is_float ? "float" : "int"});
  require("symmetric", {true});
  require("dynamic", {false});
  const std::vector<json> bits = stored_as == kPacked ? std::vector<json>{4, 8} : std::vector<json>{8};
  const bool is_4_bits = require("num_bits", bits) == 4;
  if (is_there(weights, "block_structure")) refuse_stored(where, "has weights of block_structure, expected none");
  // With other orders, a tensor of its own says which scale a column has.
  if (is_there(weights, "actorder")) require("actorder", {"static", "weight"});
  if (is_4_bits && require("strategy", {"channel", "group"}) == "group") {
    return {&find_format("int4-" + require("group_size", {32, 64, 128}).dump())};
  }
  if (is_float) return {&find_format("fp8"), require("strategy", {"channel", "tensor"}) == "tensor"};
  require("strategy", {"channel"});
  return {&find_format(is_4_bits ? "int4" : "int8")};
}

std::optional<c10::ScalarType> rounded_to(const std::string& dtype) {
  if (dtype == "BF16") return at::kBFloat16;
  if (dtype == "F16") return at::kHalf;
  return std::nullopt;
}

// `scales`: their name; the codes' follows from it.
StoredWeight weight_of(const FolderTensors& tensors, const std::string& weight, const Group& group, bool is_packed) {
  const Format& format = *group.format;
  const std::string codes = is_packed ? weight + "_packed" : weight, scales = weight + kScale;
  const files::TensorEntry& entry = tensors.at(codes, weight,
                                               {is_packed          ? "I32"
                                                : format.has_nan() ? "F8_E4M3"
                                                                   : "I8"});
  std::vector<int64_t> sizes = entry.shape;
  if (sizes.size() < 2 || (is_packed && sizes.size() > 2)) {
    refuse_stored(codes, "has the shape ", at::IntArrayRef(sizes), ", expected rows of codes");
  }
  const bool is_8_bits = format.name() == "int8";
  if (is_packed) {
    const std::string shape = weight + "_shape";
    tensors.at(shape, weight, {"I64", "I32"}, 2);
    const at::Tensor stored = tensors.read(shape).to(at::kLong).contiguous();
    const auto* const numbers = stored.const_data_ptr<int64_t>();
    const std::vector<int64_t> own(numbers, numbers + 2);
    const int64_t in_word = kWordBits / (is_8_bits ? 8 : 4);
    if (own[0] != sizes[0] || own[1] != sizes[1] * in_word) {
      refuse_stored(shape, "says ", at::IntArrayRef(own), " and ", codes, " has the shape ", at::IntArrayRef(sizes),
                    ", expected ", in_word, " codes in each word of whole rows");
    }
    sizes = own;
  }
  for (const char* other : {"_zero_point", "_g_idx"}) {
    if (tensors.has(weight + other)) refuse_stored(weight + other, "is there, expected scales alone");
  }
  require_form(format, weight, sizes);
  const int64_t count = group.has_scale_of_tensor ? 1 : c10::multiply_integers(format.parts(sizes)[1].sizes);
  const std::string& dtype = tensors.at(scales, weight, {"F32", "BF16", "F16"}, count).dtype;
  return {{.format = &format},
          sizes,
          rounded_to(dtype),
          {{.tensor = codes, .has_offset_codes = is_packed && is_8_bits},
           {.tensor = scales, .rows_of_scale = group.has_scale_of_tensor ? 0 : 1}},
          is_packed ? std::vector{weight + "_shape"} : std::vector<std::string>()};
}

StoredWeights find_compressed(const json& config, const FolderTensors& tensors) {
  const std::string format = files::member(config, "format", json::value_t::string, place(kConfig));
  const bool is_packed = format == kPacked;
  if (!is_packed && format != "int-quantized" && format != kFloat) {
    refuse_stored(kConfig, "has the format '", files::shown(format),
                  "', expected int-quantized, pack-quantized or float-quantized");
  }
  // Beside those that are read, none of which changes the numbers.
  static const std::set<std::string> harmless = {"config_groups",  "format",       "global_compression_ratio",
                                                 "ignore",         "quant_method", "quantization_status",
                                                 "run_compressed", "version"};
  for (const auto& [name, value] : config.items()) {
    const bool is_dense = name == "sparsity_config" && value == json({{"format", "dense"}});
    if (!harmless.contains(name) && !value.empty() && !is_dense) {
      refuse_stored(concat(kConfig, ".", files::shown(name)), "is set, expected quantised weights alone");
    }
  }
  std::optional<Group> own;
  for (const auto& [name, group] :
       files::member(config, "config_groups", json::value_t::object, place(kConfig)).items()) {
    const Group each = group_of(name, group, format);
    if (own && *own != each) {
      refuse_stored(kConfig, "has groups of ", own->format->name(), " and of ", each.format->name(),
                    ", or with scales of rows and of tensors, expected one format");
    }
    own = each;
  }
  if (!own) refuse_stored(kConfig, "has no config_groups, expected one");
  const std::string ending = is_packed ? "_packed" : kScale;
  StoredWeights found;
  for (const auto& [name, entry] : tensors.all()) {
    if (!name.ends_with(ending)) continue;
    const std::string weight = name.substr(0, name.size() - ending.size());
    if (is_packed || tensors.has(weight)) found.emplace(weight, weight_of(tensors, weight, *own, is_packed));
  }
  return found;
}

std::vector<std::pair<std::string, at::Tensor>> store_compressed(const std::string& name, const EncodedTensor& weight) {
  const at::Tensor& codes = weight.parts()[0];
  std::vector<int64_t> of_scales = codes.sizes().vec();
  of_scales.back() = 1;
  return {{name, codes}, {name + kScale, weight.parts()[1].view(of_scales)}};
}

nlohmann::ordered_json config_of_rows(const Format&, c10::ScalarType, const std::vector<std::string>& kept) {
  const nlohmann::ordered_json weights = {{"num_bits", 8},         {"type", "int"},         {"symmetric", true},
                                          {"strategy", "channel"}, {"group_size", nullptr}, {"dynamic", false}};
  const nlohmann::ordered_json group = {
      {"targets", {"Linear"}}, {"weights", weights}, {"input_activations", nullptr}, {"output_activations", nullptr}};
  return {{"format", "int-quantized"},
          {"quantization_status", "compressed"},
          {"config_groups", {{"group_0", group}}},
          {"ignore", kept}};
}

}  // namespace

FolderLayout compressed_layout() {
  return {"compressed-tensors", {"int8"}, find_compressed, store_compressed, config_of_rows};
}

}  // namespace roundpipe::quantise
