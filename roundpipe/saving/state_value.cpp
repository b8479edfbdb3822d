#include <roundpipe/saving/state_value.h>

#include <array>
#include <stdexcept>

#include <roundpipe/core/error.h>
#include <roundpipe/files/json_text.h>

namespace roundpipe {

namespace {

// In the order of StateValue::Content.
constexpr std::array kNames{"None",
                            "a bool",
                            "an integer",
                            "a float",
                            "a string",
                            "a string of bytes",
                            "a tensor",
                            "a list",
                            "a tuple",
                            "a dictionary",
                            "an integer of more than 64 bits",
                            "a NumPy array"};
static_assert(kNames.size() == std::variant_size_v<StateValue::Content>);

// torch's dtype of a NumPy array, by NumPy's name without the order of its bytes.
at::ScalarType dtype_of_array(const std::string& name) {
  constexpr std::array<std::pair<std::string_view, at::ScalarType>, 14> kTypes{{{"b1", at::kBool},
                                                                                {"i1", at::kChar},
                                                                                {"i2", at::kShort},
                                                                                {"i4", at::kInt},
                                                                                {"i8", at::kLong},
                                                                                {"u1", at::kByte},
                                                                                {"u2", at::kUInt16},
                                                                                {"u4", at::kUInt32},
                                                                                {"u8", at::kUInt64},
                                                                                {"f2", at::kHalf},
                                                                                {"f4", at::kFloat},
                                                                                {"f8", at::kDouble},
                                                                                {"c8", at::kComplexFloat},
                                                                                {"c16", at::kComplexDouble}}};
  for (const auto& [own, type] : kTypes) {
    if (name.size() == own.size() + 1 && (name[0] == '<' || name[0] == '|') && name.ends_with(own)) return type;
  }
  throw std::invalid_argument(concat("[checkpoint] a saved value is a NumPy array of the type ", files::shown(name),
                                     ", which torch does not have; load it from Python"));
}

}  // namespace

StateValue StateValue::dict(std::vector<std::pair<std::string, StateValue>> entries) {
  Dict made;
  for (auto& [key, value] : entries) made.emplace_back(std::move(key), std::move(value));
  return made;
}

template <typename T>
const T& StateValue::as(const char* expected) const {
  if (const T* const found = std::get_if<T>(&content_)) return *found;
  throw WrongStateType(concat("[checkpoint] a saved value is ", kNames.at(content_.index()), ", expected ", expected));
}

bool StateValue::as_bool() const { return as<bool>("a bool"); }
int64_t StateValue::as_int() const { return as<int64_t>("an integer"); }
double StateValue::as_double() const {
  if (const int64_t* const whole = std::get_if<int64_t>(&content_)) return static_cast<double>(*whole);
  return as<double>("a number");
}
const std::string& StateValue::as_string() const { return as<std::string>("a string"); }
at::Tensor StateValue::as_tensor() const {
  if (const Array* const array = std::get_if<Array>(&content_))
    return array->bytes.contiguous().view(dtype_of_array(array->dtype)).reshape(array->shape);
  return as<at::Tensor>("a tensor");
}

const StateValue::List& StateValue::items() const {
  if (const Tuple* const tuple = std::get_if<Tuple>(&content_)) return tuple->items;
  return as<List>("a list or a tuple");
}

const StateValue::Dict& StateValue::entries() const { return as<Dict>("a dictionary"); }

const StateValue* StateValue::find(std::string_view key) const {
  for (const auto& [own, value] : entries()) {
    const std::string* const text = std::get_if<std::string>(&own.content_);
    if (text != nullptr && *text == key) return &value;
  }
  return nullptr;
}

const StateValue& StateValue::at(std::string_view key) const {
  if (const StateValue* const found = find(key)) return *found;
  throw WrongStateType(concat("[checkpoint] a saved dictionary has no '", key, "'"));
}

}  // namespace roundpipe
