#include <roundpipe/language/json_fields.h>

#include <stdexcept>
#include <utility>

#include <roundpipe/core/error.h>
#include <roundpipe/files/json_text.h>

namespace roundpipe::language {

using nlohmann::json;

namespace {

constexpr int64_t kMostInteger = int64_t{1} << 40;

}  // namespace

JsonFields::JsonFields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
  if (!object.is_object()) refuse("is no JSON object, expected one");
}

bool JsonFields::has(const std::string& name) {
  taken_.insert(name);
  const auto found = object_.find(name);
  return found != object_.end() && !found->is_null();
}

bool JsonFields::is_null(const std::string& name) {
  taken_.insert(name);
  const auto found = object_.find(name);
  return found != object_.end() && found->is_null();
}

const json& JsonFields::at(const std::string& name) {
  if (!has(name)) refuse(concat("has no '", name, "', expected it"));
  return object_.at(name);
}

int64_t JsonFields::integer(const std::string& name, std::optional<int64_t> otherwise, int64_t least) {
  if (!has(name) && otherwise) return *otherwise;
  const json& value = at(name);
  if (!value.is_number_integer() || value.get<int64_t>() < least || value.get<int64_t>() > kMostInteger) {
    refuse(name, value, concat("an integer of at least ", least));
  }
  return value.get<int64_t>();
}

double JsonFields::number(const std::string& name, std::optional<double> otherwise) {
  if (!has(name) && otherwise) return *otherwise;
  const json& value = at(name);
  if (!value.is_number()) refuse(name, value, "a number");
  return value.get<double>();
}

double JsonFields::positive(const std::string& name, std::optional<double> otherwise) {
  const double value = number(name, otherwise);
  if (!(value > 0)) refuse(name, object_.at(name), "a positive number");
  return value;
}

double JsonFields::share(const std::string& name) {
  const double value = number(name, 0);
  if (!(value >= 0 && value <= 1)) refuse(name, object_.at(name), "a number from 0 to 1");
  return value;
}

bool JsonFields::flag(const std::string& name, bool otherwise) {
  if (!has(name)) return otherwise;
  const json& value = at(name);
  if (!value.is_boolean()) refuse(name, value, "true or false");
  return value.get<bool>();
}

std::string JsonFields::text(const std::string& name, std::optional<std::string> otherwise) {
  if (!has(name) && otherwise) return *otherwise;
  const json& value = at(name);
  if (!value.is_string()) refuse(name, value, "a string");
  return value.get<std::string>();
}

void JsonFields::must_be(const std::string& name, const json& expected) {
  if (has(name) && at(name) != expected) refuse(name, at(name), expected.dump() + "; train this model from Python");
}

void JsonFields::refuse(const std::string& what) const { throw std::invalid_argument(concat(where_, " ", what)); }

void JsonFields::refuse(const std::string& name, const json& value, const std::string& expected) const {
  refuse(concat("has '", name, "': ", files::shown(value.dump()), ", expected ", expected));
}

void JsonFields::refuse_others(const std::set<std::string>& ignored) const {
  for (const auto& [name, value] : object_.items()) {
    if (value.is_null() || taken_.count(name) != 0 || ignored.count(name) != 0) continue;
    refuse(concat("has the field '", files::shown(name), "', which is not known here and may change the ",
                  "computation; train this model from Python, or remove the field if it says nothing about that"));
  }
}

}  // namespace roundpipe::language
