#include <roundpipe/saving/state_check.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>

#include <roundpipe/core/error.h>
#include <roundpipe/files/json_text.h>
#include <roundpipe/saving/contents.h>

namespace roundpipe {

using files::count;
using files::member;
using files::shown;
using nlohmann::json;
using Type = json::value_t;

namespace {

// What one of the encoders makes at most: docs/reference/checkpoint-format.md.
constexpr int kMostNesting = 66;
constexpr std::size_t kMostDigits = 4300;  // of an integer that Python takes
constexpr int64_t kMostMicrobatches = std::numeric_limits<int>::max();

bool only_has(std::string_view text, std::string_view letters) {
  return text.find_first_not_of(letters) == std::string_view::npos;
}

bool is_base64(std::string_view text) {
  const std::size_t end = text.find('=');
  constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  return text.size() % 4 == 0 && only_has(text.substr(0, end), kLetters) &&
         (end == std::string_view::npos || (text.size() - end <= 2 && only_has(text.substr(end), "=")));
}

bool is_integer(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  return !text.empty() && text.size() <= kMostDigits && only_has(text, "0123456789");
}

// The bytes of an element of a NumPy array, by its type's name; 0 for no such name.
int64_t element_bytes(std::string_view name) {
  if (name.size() < 3 || !only_has(name.substr(0, 1), "<>|=") || !only_has(name.substr(1, 1), "biufc")) return 0;
  int64_t bytes = 0;
  const auto [end, error] = std::from_chars(name.data() + 2, name.data() + name.size(), bytes);
  return error == std::errc{} && end == name.data() + name.size() && bytes >= 1 && bytes <= 64 ? bytes : 0;
}

// Checks one file's state.
class Check {
 public:
  Check(const saving::StoredSection& tensors, const std::string& where) : tensors_(tensors), where_(where) {}

  template <typename... Parts>
  [[noreturn]] void refuse(const Parts&... what) const {
    throw Error(concat("[", where_, "] ", what..., "; the file is damaged, or newer than this version"));
  }

  const json& table(const json& of, const char* name) const { return member(of, name, Type::object, where_); }

  void texts(const json& of, const char* name) const {
    for (const auto& [key, value] : table(of, name).items()) {
      if (!value.is_string()) refuse("'", name, "' has for '", shown(key), "' ", value.type_name(), ", expected text");
    }
  }

  void number(const json& of, const char* name) const {
    if (!member(of, name, where_).is_number()) {
      refuse("'", name, "' is ", member(of, name, where_).type_name(), ", expected a number");
    }
  }

  // As a program gives it: one object with either name.
  void given(const json& entry, const std::string& field) const {
    if (!entry.is_object() || entry.size() != 1 || !(entry.contains("state_dict") || entry.contains("value"))) {
      refuse("'", field, "' is not as a program gives it, expected a state_dict or a value");
    }
    encoded(entry.begin().value(), field);
  }

  void encoded(const json& value, const std::string& field, int depth = 0) const {
    if (value.is_array()) return items(value, field, depth);
    if (!value.is_object()) return;
    if (depth >= kMostNesting) refuse("'", field, "' has values nested more than ", kMostNesting, " deep");
    for (const char* const tag : {"array", "number"}) {
      if (value.contains(tag)) return array(value, tag, field);
    }
    if (value.size() != 1) refuse("'", field, "' has an object of ", value.size(), " names, expected one");
    const std::string& tag = value.begin().key();
    const json& content = value.begin().value();
    if (tag == "dict") return dict(content, field, depth);
    if (tag == "tuple") return items(content, field, depth);
    if (!content.is_string()) refuse("'", field, "' has a '", shown(tag), "' that cannot be decoded");
    const auto& text = content.get_ref<const std::string&>();
    const bool is_right = tag == "tensor"  ? tensors_.contains(text)
                          : tag == "bytes" ? is_base64(text)
                          : tag == "int"   ? is_integer(text)
                          : tag == "float" ? text == "nan" || text == "inf" || text == "-inf"
                                           : false;
    if (!is_right) refuse("'", field, "' has the ", shown(tag), " '", shown(text), "', which cannot be decoded");
  }

  static bool is_dict(const json& value) { return value.is_object() && value.size() == 1 && value.contains("dict"); }

  // The content of an encoded dictionary under a text; null if there is none. Other values have no such contents.
  static const json* entry(const json& dict, std::string_view name) {
    if (!is_dict(dict)) return nullptr;
    for (const json& pair : dict.at("dict")) {
      if (pair[0].is_string() && pair[0].get_ref<const std::string&>() == name) return &pair[1];
    }
    return nullptr;
  }

  void optimizer(const json& state) const {
    const json& saved = table(state, "optimizer");
    member(saved, "class", Type::string, where_);
    const bool is_of_torch = member(saved, "moments", Type::string, where_) == kMomentsOfTorch;
    for (const json& group : member(saved, "param_groups", Type::array, where_)) {
      for (const json& name : member(group, "params", Type::array, where_)) {
        if (!name.is_string() && !name.is_null())
          refuse("'params' of a group has ", name.type_name(), ", expected names");
      }
      dict_of_texts(member(group, "options", where_), "optimizer.param_groups");
    }
    if (!is_of_torch) return;
    const json& own = member(saved, "state_dict", where_);
    encoded(own, "optimizer");
    if (!is_dict(own)) refuse("'optimizer' has a state_dict that is no dictionary");
    for (const json& pair : own.at("dict")) {
      if (pair[0].is_number() && !is_dict(pair[1])) refuse("'optimizer' has a state that is no dictionary");
    }
  }

  void scaler(const json& state) const {
    const json& saved = state.at("scaler");
    dict_of_texts(saved, "scaler");
    const json* const own = entry(saved, "state");
    const json* const resume = entry(saved, "resume");
    if (own == nullptr || resume == nullptr) refuse("'scaler' has no state, or not how it goes on");
    dict_of_texts(*own, "scaler.state");
    dict_of_texts(*resume, "scaler.resume");
    // One that is disabled has nothing.
    if (!own->at("dict").empty()) {
      for (const char* const name :
           {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}) {
        const json* const value = entry(*own, name);
        if (value == nullptr || !value->is_number()) refuse("'scaler' has no number '", name, "'");
      }
    }
    const json* const front = entry(*resume, "front");
    const json* const updates = entry(*resume, "updates_on_main");
    if (front == nullptr || !(front->is_null() || front->is_number()) || updates == nullptr || !updates->is_boolean()) {
      refuse("'scaler' does not say how it goes on");
    }
  }

  void pool(const json& state) const {
    const auto adds = state.find("fp16_accumulation");
    if (adds != state.end() && !adds->is_boolean())
      refuse("'fp16_accumulation' is ", adds->dump(), ", expected a boolean");
  }

  void pipelines(const json& state) const {
    for (const auto& [path, pipeline] : table(state, "pipelines").items()) {
      for (const char* const name : {"calls", "random_seed"}) {
        if (!member(pipeline, name, where_).is_number_unsigned()) {
          refuse("'", name, "' of '", shown(path), "' is no whole number of at least 0");
        }
      }
      if (const auto bytes = pipeline.find("chunk_logit_bytes"); bytes != pipeline.end() && !bytes->is_null()) {
        if (count(*bytes, "'chunk_logit_bytes'", where_) < 1) refuse("'chunk_logit_bytes' is 0, expected 1 or more");
      }
      if (const auto form = pipeline.find("arithmetic"); form != pipeline.end() && !form->is_null()) {
        if (*form != "exact" && *form != "fast") refuse("'arithmetic' is ", form->dump(), ", expected exact or fast");
      }
      const json& microbatches = member(pipeline, "num_microbatch", where_);
      if (microbatches.is_null()) continue;
      const int64_t number = count(microbatches, "'num_microbatch'", where_);
      if (number < 1 || number > kMostMicrobatches) refuse("'num_microbatch' is ", number, ", expected 1 or more");
    }
  }

  void counters(const json& state) const {
    for (const auto& [name, scalars] : table(state, "counters").items()) {
      for (const char* const counter : {"step", "mu_product", "eta", "mu"}) number(scalars, counter);
    }
  }

  void random(const json& state) const {
    const json& saved = member(state, "random", where_);
    dict_of_texts(saved, "random");
    const json* const own = entry(saved, "torch");
    const bool is_tensor = own != nullptr && own->is_object() && own->size() == 1 && own->contains("tensor");
    if (!is_tensor) refuse("'random' has no state of torch");
    const saving::StoredTensor& tensor = tensors_.at(own->at("tensor").get<std::string>());
    if (tensor.dtype != at::kByte || tensor.shape.size() != 1) refuse("'random' has a state of torch that is no bytes");
  }

  void loss_counts(const json& state) const {
    const json& saved = state.at("loss_counts");
    if (saved.is_null()) return;
    const json& used = member(saved, "used", where_);
    if (!used.is_null() && !used.is_string()) refuse("'used' of 'loss_counts' is ", used.type_name());
    number(saved, "items");
    number(saved, "labels");
  }

  void ranges(const json& state) const {
    for (const auto& [name, range] : table(state, "ranges").items()) {
      if (!range.is_array() || range.size() != 2 ||
          count(range[0], "the first element of a range", where_) > count(range[1], "its end", where_)) {
        refuse("the range of '", shown(name), "' is no two numbers, the first not above the second");
      }
    }
    for (const auto& [name, strides] : table(state, "strides").items()) {
      if (!strides.is_array()) refuse("the strides of '", shown(name), "' are ", strides.type_name());
      for (const json& stride : strides) count(stride, "a stride", where_);
    }
  }

 private:
  void items(const json& content, const std::string& field, int depth) const {
    if (!content.is_array()) refuse("'", field, "' has ", content.type_name(), ", expected a list");
    if (depth >= kMostNesting) refuse("'", field, "' has values nested more than ", kMostNesting, " deep");
    for (const json& item : content) encoded(item, field, depth + 1);
  }

  void dict(const json& content, const std::string& field, int depth) const {
    if (!content.is_array())
      refuse("'", field, "' has a dictionary of ", content.type_name(), ", expected its entries");
    for (const json& pair : content) {
      if (!pair.is_array() || pair.size() != 2) refuse("'", field, "' has a dictionary whose entries are no pairs");
      const json& key = pair[0];
      const bool is_plain = key.is_primitive();
      const bool is_tagged = key.is_object() && (key.contains("tuple") || key.contains("int") || key.contains("float"));
      if (!is_plain && !is_tagged) refuse("'", field, "' has a key that is ", key.type_name());
      encoded(key, field, depth + 1);
      encoded(pair[1], field, depth + 1);
    }
  }

  void dict_of_texts(const json& value, const std::string& field) const {
    encoded(value, field);
    if (!is_dict(value)) refuse("'", field, "' is no dictionary");
    for (const json& pair : value.at("dict")) {
      if (!pair[0].is_string()) refuse("'", field, "' has a key that is no text");
    }
  }

  void array(const json& value, const char* tag, const std::string& field) const {
    const json& name = value.at(tag);
    const auto found = name.is_string() ? tensors_.find(name.get<std::string>()) : tensors_.end();
    if (found == tensors_.end()) refuse("'", field, "' has an array whose tensor is not there");
    const std::string& type = member(value, "dtype", Type::string, where_).get_ref<const std::string&>();
    int64_t bytes = element_bytes(type);
    if (bytes == 0) refuse("'", field, "' has an array of the type '", shown(type), "', which NumPy does not have");
    const json& shape = member(value, "shape", Type::array, where_);
    if (shape.size() > 64) refuse("'", field, "' has an array of ", shape.size(), " dimensions");
    bool is_empty = false;
    for (const json& dimension : shape) {
      const int64_t size = count(dimension, "a dimension of an array", where_);
      is_empty = is_empty || size == 0;
      // Also where another dimension is 0.
      if (size > 0 && bytes > std::numeric_limits<int64_t>::max() / size)
        refuse("'", field, "' has an array larger than its tensor");
      bytes *= std::max<int64_t>(1, size);
    }
    if (is_empty) bytes = 0;
    if (bytes != found->second.bytes || found->second.dtype != at::kByte) {
      refuse("'", field, "' has an array of another size than its tensor");
    }
  }

  const saving::StoredSection& tensors_;
  const std::string& where_;
};

}  // namespace

void check_state(const json& state, StateKind kind, const saving::StoredSection& tensors, const std::string& where) {
  const Check check(tensors, where);
  if (!state.is_object()) check.refuse("the state is ", state.type_name(), ", expected an object");
  if (kind != StateKind::kRank) {
    count(member(state, "step", where), "'step'", where);
    count(member(state, "steps", where), "'steps'", where);
    for (const char* const name : {"dtypes", "outside", "tied", "versions"}) check.texts(state, name);
  }
  if (kind == StateKind::kWeights) return;
  if (kind != StateKind::kRank) {
    if (state.contains("optimizer")) check.optimizer(state);
    if (state.contains("scaler")) check.scaler(state);
    check.pool(state);
    if (state.contains("lr_schedulers")) {
      for (const json& entry : member(state, "lr_schedulers", Type::array, where)) check.given(entry, "lr_schedulers");
    }
  }
  if (kind == StateKind::kCommon) return;
  check.pipelines(state);
  check.random(state);
  for (const auto& [name, entry] : check.table(state, "state").items())
    check.given(entry, concat("state.", shown(name)));
  const bool is_fused = kind == StateKind::kRank
                            ? state.contains("ranges")
                            : state.contains("optimizer") && state.at("optimizer").at("moments") != kMomentsOfTorch;
  if (is_fused || state.contains("counters")) check.counters(state);
  if (state.contains("last_norm")) check.number(state, "last_norm");
  if (state.contains("loss_counts")) check.loss_counts(state);
  if (kind == StateKind::kRank && state.contains("ranges")) check.ranges(state);
}

void check_ranges(const std::vector<json>& states, const std::vector<saving::StoredSections>& sections,
                  const saving::StoredSection& weights, const std::string& folder) {
  const auto refuse = [&](const std::string& name, const auto&... what) {
    throw Error(concat("[", folder, "] '", shown(name), "' ", what..., "; the checkpoint is damaged, use another one"));
  };
  int64_t weight_bytes = 0;
  for (const auto& [name, tensor] : weights) weight_bytes += tensor.bytes;
  std::map<std::string, int64_t> ends;
  for (size_t rank = 0; rank < states.size(); ++rank) {
    const json none = json::object();
    const json& ranges = states[rank].contains("ranges") ? states[rank].at("ranges") : none;
    for (const auto& [name, range] : ranges.items()) {
      int64_t& end = ends[name];
      const auto [first, last] = range.get<std::array<int64_t, 2>>();
      if (first == last) continue;  // this rank has none of it, wherever that is
      if (first != end) refuse(name, "goes on at element ", first, " on rank ", rank, ", not ", end);
      end = last;
    }
    const auto optimizer = sections[rank].find(kOptimizer);
    if (optimizer == sections[rank].end()) continue;
    for (const auto& [key, tensor] : optimizer->second) {
      if (ranges.contains(key.substr(0, key.rfind('/')))) continue;
      refuse(key, "is on rank ", rank, ", which does not say which elements it has");
    }
  }
  for (const auto& [name, end] : ends) {
    const auto found = weights.find(name);  // adapters have other names there
    int64_t elements = 1;
    if (found != weights.end()) {
      for (const int64_t size : found->second.shape) elements *= size;
    }
    if (found != weights.end() ? end != elements : end > weight_bytes) {
      refuse(name, "has ", end, " elements in the optimizer's state, which are not those of the weights");
    }
  }
}

}  // namespace roundpipe
