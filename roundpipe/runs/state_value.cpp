#include <roundpipe/runs/state_value.h>

#include <array>
#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe {

namespace {

// In the order of StateValue::Content.
constexpr std::array kNames{"None",     "a bool", "an integer", "a float",     "a string", "a string of bytes",
                            "a tensor", "a list", "a tuple",    "a dictionary"};
static_assert(kNames.size() == std::variant_size_v<StateValue::Content>);

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
const at::Tensor& StateValue::as_tensor() const { return as<at::Tensor>("a tensor"); }

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
