#include "json_text.h"

#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>
#include <vector>

#include <roundpipe/core/error.h>

namespace roundpipe::files {

using nlohmann::json;

json parse_json(std::string_view text, const std::string& where, const JsonLimits& limits) {
  int64_t values = 0;
  std::vector<std::set<std::string>> names;  // of the objects and lists around, outermost first
  const auto check = [&](int /*depth*/, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        names.emplace_back();
        if (static_cast<int>(names.size()) > limits.depth) {
          throw Error(concat("[", where, "] the JSON has more than ", limits.depth, " levels; it is damaged"));
        }
        break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end:
        names.pop_back();
        return true;
      case json::parse_event_t::key: {
        const auto& name = parsed.get_ref<const std::string&>();
        if (!names.back().insert(name).second) {
          throw Error(concat("[", where, "] '", shown(name), "' stands twice in one object; the file is damaged"));
        }
        break;
      }
      case json::parse_event_t::value:
        break;
    }
    if (++values > limits.values) {
      throw Error(concat("[", where, "] the JSON has more than ", limits.values, " values; it is damaged"));
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::exception& wrong) {
    throw Error(concat("[", where, "] is not JSON, or it is damaged: ", shown(wrong.what())));
  }
}

std::string print_json(const nlohmann::ordered_json& value, const std::string& where, bool one_line) {
  try {
    return value.dump(one_line ? -1 : 2);
  } catch (const json::exception& wrong) {
    throw std::invalid_argument(concat("[", where, "] a name or text is not UTF-8: ", shown(wrong.what())));
  }
}

std::string python_text(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  std::array<char, 32> buffer{};
  const char* const end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), number, std::chars_format::scientific).ptr;
  std::string_view text(buffer.data(), static_cast<size_t>(end - buffer.data()));  // "-1.25e-07"
  std::string out(text.starts_with('-') ? "-" : "");
  text.remove_prefix(out.size());
  const size_t mark = text.find('e');
  int exponent = 0;
  std::from_chars(text.data() + mark + (text[mark + 1] == '+' ? 2 : 1), end, exponent);
  std::string digits(1, text[0]);
  if (mark > 2) digits += text.substr(2, mark - 2);
  const auto count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    return concat(out, digits[0], count > 1 ? "." : "", digits.substr(1), text.substr(mark));
  }
  if (exponent < 0) return concat(out, "0.", std::string(static_cast<size_t>(-exponent - 1), '0'), digits);
  if (count <= exponent + 1)
    return concat(out, digits, std::string(static_cast<size_t>(exponent + 1 - count), '0'), ".0");
  const auto whole = static_cast<size_t>(exponent) + 1;
  return concat(out, digits.substr(0, whole), ".", digits.substr(whole));
}

namespace {

void print_as_python(const nlohmann::ordered_json& value, const std::string& where, std::string& out) {
  const char* separator = "";
  if (value.is_object()) {
    out += '{';
    for (const auto& [name, item] : value.items()) {
      out += separator;
      print_as_python(name, where, out);
      out += ": ";
      print_as_python(item, where, out);
      separator = ", ";
    }
    out += '}';
  } else if (value.is_array()) {
    out += '[';
    for (const auto& item : value) {
      out += separator;
      print_as_python(item, where, out);
      separator = ", ";
    }
    out += ']';
  } else if (value.is_number_float()) {
    const auto number = value.get<double>();
    if (!std::isfinite(number)) throw Error(concat("[", where, "] a number is ", number, ", which JSON does not have"));
    out += python_text(number);
  } else {
    out += value.dump(-1, ' ', /*ensure_ascii=*/true);
  }
}

}  // namespace

std::string print_json_as_python(const nlohmann::ordered_json& value, const std::string& where) {
  std::string out;
  try {
    print_as_python(value, where, out);
  } catch (const json::exception& wrong) {
    throw std::invalid_argument(concat("[", where, "] a name or text is not UTF-8: ", shown(wrong.what())));
  }
  return out;
}

const json& member(const json& object, const char* name, const std::string& where) {
  const auto found = object.is_object() ? object.find(name) : object.end();
  if (found == object.end()) throw Error(concat("[", where, "] '", name, "' is missing; the file is damaged"));
  return *found;
}

const json& member(const json& object, const char* name, json::value_t type, const std::string& where) {
  const json& found = member(object, name, where);
  if (found.type() == type) return found;
  throw Error(concat("[", where, "] '", shown(name), "' is of the type ", found.type_name(), ", expected ",
                     json(type).type_name(), "; the file is damaged"));
}

int64_t count(const json& value, const std::string& what, const std::string& where) {
  if (!value.is_number_unsigned() ||
      value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    throw Error(concat("[", where, "] ", what, " is ", value.is_number() ? shown(value.dump()) : value.type_name(),
                       ", expected a whole number of at least 0; the file is damaged"));
  }
  return static_cast<int64_t>(value.get<uint64_t>());
}

std::string shown(std::string_view text) {
  constexpr std::size_t kMost = 80;
  std::string out(text.substr(0, kMost));
  for (char& letter : out) {
    if (static_cast<unsigned char>(letter) < 0x20 || static_cast<unsigned char>(letter) > 0x7E) letter = '?';
  }
  return text.size() > kMost ? out + "..." : out;
}

}  // namespace roundpipe::files
