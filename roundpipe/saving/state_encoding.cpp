#include <roundpipe/saving/state_encoding.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include <c10/core/ScalarType.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/fingerprint.h>
#include <roundpipe/files/json_text.h>

namespace roundpipe {

using nlohmann::json;
using nlohmann::ordered_json;

namespace {

constexpr int kDeepest = 64;
constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

std::string to_base64(const std::string& data) {
  std::string text;
  for (size_t i = 0; i < data.size(); i += 3) {
    uint32_t group = 0;
    for (size_t j = 0; j < 3; ++j) group = group << 8 | (i + j < data.size() ? static_cast<uint8_t>(data[i + j]) : 0U);
    for (size_t j = 0; j < 4; ++j) {
      text += i + j <= data.size() ? kDigits[group >> (18 - 6 * j) & 63U] : '=';
    }
  }
  return text;
}

std::string from_base64(const std::string& text, const std::string& path) {
  const auto refuse = [&] { throw Error(concat("[load_checkpoint] ", path, " holds bytes that are not base64")); };
  std::string data;
  if (text.size() % 4 != 0) refuse();
  for (size_t i = 0; i < text.size(); i += 4) {
    uint32_t group = 0;
    size_t padding = 0;
    for (size_t j = 0; j < 4; ++j) {
      const size_t digit = kDigits.find(text[i + j]);
      if (digit != std::string_view::npos && padding == 0) {
        group = group << 6 | static_cast<uint32_t>(digit);
      } else if (text[i + j] == '=' && j >= 2 && i + 4 == text.size()) {
        group <<= 6;
        ++padding;
      } else {
        refuse();
      }
    }
    for (size_t j = 0; j < 3 - padding; ++j) data += static_cast<char>(group >> (16 - 8 * j) & 255U);
  }
  return data;
}

void require_utf8(const std::string& text, const std::string& path) {
  try {
    (void)json(text).dump();
  } catch (const json::exception&) {
    throw std::invalid_argument(
        concat("[save_checkpoint] ", path, " is no text in UTF-8, expected one; save it as StateValue::Bytes"));
  }
}

// As Python prints a layout.
const char* layout_text(at::Layout layout) {
  switch (layout) {
    case at::kStrided:
      return "torch.strided";
    case at::kSparse:
      return "torch.sparse_coo";
    case at::kSparseCsr:
      return "torch.sparse_csr";
    case at::kSparseCsc:
      return "torch.sparse_csc";
    case at::kSparseBsr:
      return "torch.sparse_bsr";
    case at::kSparseBsc:
      return "torch.sparse_bsc";
    case at::kMkldnn:
      return "torch._mkldnn";
    default:
      return "torch.jagged";
  }
}

// As Python prints a key that stands within a tuple.
std::string repr_of(const StateValue& key) {
  const StateValue::Content& content = key.content();
  if (key.is_none()) return "None";
  if (const bool* const flag = std::get_if<bool>(&content)) return *flag ? "True" : "False";
  if (const int64_t* const number = std::get_if<int64_t>(&content)) return std::to_string(*number);
  if (const double* const number = std::get_if<double>(&content)) return files::python_text(*number);
  if (const auto* const number = std::get_if<StateValue::LargeInt>(&content)) return number->digits;
  if (const auto* const tuple = std::get_if<StateValue::Tuple>(&content)) {
    std::string text;
    for (const StateValue& item : tuple->items) text += concat(text.empty() ? "" : ", ", repr_of(item));
    return concat("(", text, tuple->items.size() == 1 ? ",)" : ")");
  }
  const std::string* const text = std::get_if<std::string>(&content);
  if (text == nullptr) return "?";
  const char quote = text->find('\'') != std::string::npos && text->find('"') == std::string::npos ? '"' : '\'';
  std::string quoted(1, quote);
  for (const char letter : *text) {
    if (letter == quote || letter == '\\') quoted += '\\';
    quoted += letter == '\n' ? "\\n" : letter == '\r' ? "\\r" : letter == '\t' ? "\\t" : std::string(1, letter);
  }
  return quoted + quote;
}

StateValue::List decode_items(const json& items, const FindTensor& tensor, const std::string& path) {
  StateValue::List list;
  for (size_t i = 0; i < items.size(); ++i) list.push_back(decode_state(items[i], tensor, concat(path, "[", i, "]")));
  return list;
}

StateValue decode_tagged(const json& value, const FindTensor& tensor, const std::string& path) {
  const auto unknown = [&]() {
    return Error(
        concat("[load_checkpoint] ", path,
               " cannot be decoded, expected the encoding of docs/reference/checkpoint-format.md; the checkpoint is "
               "damaged or newer than this version"));
  };
  // Of several names, one is the tag. Parsed objects do not keep their order.
  for (const char* const tag : {"array", "number"}) {
    if (!value.contains(tag)) continue;
    StateValue::Array array{tensor(value.at(tag).get<std::string>()),
                            files::member(value, "dtype", json::value_t::string, path).get<std::string>(),
                            {},
                            tag == std::string_view("number")};
    for (const json& size : files::member(value, "shape", json::value_t::array, path))
      array.shape.push_back(files::count(size, "a size", path));
    return array;
  }
  if (value.size() != 1) throw unknown();
  const auto only = value.begin();
  const std::string tag = only.key();
  const json& content = *only;
  if (tag == "int") return StateValue::LargeInt{content.get<std::string>()};
  if (tag == "float") {
    const std::string text = content.get<std::string>();
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return std::numeric_limits<double>::infinity();
    if (text == "-inf") return -std::numeric_limits<double>::infinity();
    throw unknown();
  }
  if (tag == "bytes") return StateValue::Bytes{from_base64(content.get<std::string>(), path)};
  if (tag == "tensor") return tensor(content.get<std::string>());
  if (tag == "tuple" && content.is_array()) return StateValue::Tuple{decode_items(content, tensor, path)};
  if (tag != "dict" || !content.is_array()) throw unknown();
  StateValue::Dict dict;
  for (const json& entry : content) {
    if (!entry.is_array() || entry.size() != 2) throw unknown();
    StateValue key = decode_state(entry[0], tensor, path + "'s key");
    StateValue decoded = decode_state(entry[1], tensor, concat(path, ".", text_of_key(key)));
    dict.emplace_back(std::move(key), std::move(decoded));
  }
  return dict;
}

}  // namespace

std::string text_of_key(const StateValue& key) {
  const std::string* const text = std::get_if<std::string>(&key.content());
  return text != nullptr ? *text : repr_of(key);
}

void require_shallow(int depth, bool contains_itself, const std::string& path) {
  if (depth <= kDeepest && !contains_itself) return;
  throw std::invalid_argument(concat("[save_checkpoint] ", path, " contains itself, or is nested more than ", kDeepest,
                                     " deep, expected plain values; leave it out of the state"));
}

ordered_json StateEncoder::encode(const StateValue& value, const std::string& path, bool copies_tensors) {
  copies_ = copies_tensors;
  return encode_within(value, path, 0);
}

ordered_json StateEncoder::encode_items(const StateValue::List& items, const std::string& path, int depth) {
  ordered_json list = ordered_json::array();
  for (size_t i = 0; i < items.size(); ++i)
    list.push_back(encode_within(items[i], concat(path, "[", i, "]"), depth + 1));
  return list;
}

ordered_json StateEncoder::encode_within(const StateValue& value, const std::string& path, int depth) {
  const StateValue::Content& content = value.content();
  if (const bool* const flag = std::get_if<bool>(&content)) return *flag;
  if (const int64_t* const number = std::get_if<int64_t>(&content)) return *number;
  if (const double* const number = std::get_if<double>(&content)) {
    if (std::isfinite(*number)) return *number;
    return {{"float", std::isnan(*number) ? "nan" : *number > 0 ? "inf" : "-inf"}};
  }
  if (const std::string* const text = std::get_if<std::string>(&content)) {
    require_utf8(*text, path);
    return *text;
  }
  if (const auto* const bytes = std::get_if<StateValue::Bytes>(&content)) return {{"bytes", to_base64(bytes->data)}};
  if (const at::Tensor* const tensor = std::get_if<at::Tensor>(&content)) return {{"tensor", keep(*tensor, path)}};
  if (const auto* const number = std::get_if<StateValue::LargeInt>(&content)) return {{"int", number->digits}};
  if (const auto* const array = std::get_if<StateValue::Array>(&content)) {
    return {{array->is_number ? "number" : "array", keep(array->bytes, path)},
            {"dtype", array->dtype},
            {"shape", array->shape}};
  }
  if (value.is_none()) return nullptr;
  require_shallow(depth, false, path);
  if (const auto* const list = std::get_if<StateValue::List>(&content)) return encode_items(*list, path, depth);
  if (const auto* const tuple = std::get_if<StateValue::Tuple>(&content))
    return {{"tuple", encode_items(tuple->items, path, depth)}};
  ordered_json entries = ordered_json::array();
  for (const auto& [key, own] : std::get<StateValue::Dict>(content)) {
    ordered_json name = encode_within(key, concat(path, "'s key ", repr_of(key)), depth + 1);
    ordered_json encoded = encode_within(own, concat(path, ".", text_of_key(key)), depth + 1);
    entries.push_back(ordered_json::array({std::move(name), std::move(encoded)}));
  }
  return {{"dict", std::move(entries)}};
}

std::string StateEncoder::keep(const at::Tensor& tensor, const std::string& path) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta()) {
    const std::string what = tensor.defined()
                                 ? concat("a ", layout_text(tensor.layout()), " tensor on ", tensor.device())
                                 : "a tensor that is not there";
    throw std::invalid_argument(concat("[save_checkpoint] ", path, " is ", what,
                                       ", expected a dense one with values; convert it with to_dense(), or leave it "
                                       "out"));
  }
  std::string name = path;
  for (int count = 1; !names_.emplace(name, 0).second; ++count) name = concat(path, "#", count);
  at::Tensor kept = tensor.detach().cpu().resolve_conj().resolve_neg();
  if (copies_ && kept.is_alias_of(tensor)) kept = kept.clone();
  tensors_.emplace_back(name, std::move(kept));
  return name;
}

std::vector<std::string> tensor_names(const json& encoded) {
  std::vector<std::string> names;
  if (!encoded.is_structured()) return names;
  for (const auto& [tag, content] : encoded.items()) {
    if (encoded.is_object() && content.is_string() && (tag == "tensor" || tag == "array" || tag == "number")) {
      names.push_back(content.get<std::string>());
      continue;
    }
    for (std::string& name : tensor_names(content)) names.push_back(std::move(name));
  }
  return names;
}

uint64_t fingerprint_of(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().contiguous();
  const std::string head = concat(dense.scalar_type(), dense.sizes());
  return join_fingerprints(fingerprint(head.data(), head.size()), fingerprint(dense.const_data_ptr(), dense.nbytes()));
}

StateValue decode_state(const json& value, const FindTensor& tensor, const std::string& path) {
  if (value.is_null()) return {};
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array()) return decode_items(value, tensor, path);
  try {
    return decode_tagged(value, tensor, path);
  } catch (const json::exception& error) {
    throw Error(concat("[load_checkpoint] ", path, " cannot be decoded (", error.what(),
                       "), expected the encoding of docs/reference/checkpoint-format.md"));
  }
}

}  // namespace roundpipe
