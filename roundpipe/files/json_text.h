#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

// JSON of files that may hold anything. Private to this level's sources: its headers do not include it.
namespace roundpipe::files {

struct JsonLimits {
  int depth = 16;              // of lists and objects in each other
  int64_t values = 4'000'000;  // names of objects count, too
};

// Parses a text strictly: one value, UTF-8, no comments, no name twice in an object. Memory is bounded by the text's
// length and `limits`. Throws Error that begins "[where]".
nlohmann::json parse_json(std::string_view text, const std::string& where, const JsonLimits& limits = {});

// The JSON text of a value; "  " before each level, or everything in one line. Throws std::invalid_argument, naming
// `where`, for text that is not UTF-8.
std::string print_json(const nlohmann::ordered_json& value, const std::string& where, bool one_line = false);

// The same as Python's json module prints it, with all text in ASCII. Throws Error, too, for NaN and infinities.
std::string print_json_as_python(const nlohmann::ordered_json& value, const std::string& where);
// Python's text of a number: the fewest digits that give it back.
std::string python_text(double number);

// A member of an object, of any type or of one; an Error that names it where it is missing or another type.
const nlohmann::json& member(const nlohmann::json& object, const char* name, const std::string& where);
const nlohmann::json& member(const nlohmann::json& object, const char* name, nlohmann::json::value_t type,
                             const std::string& where);
// A number without sign and fraction, at most 2^63 - 1.
int64_t count(const nlohmann::json& value, const std::string& what, const std::string& where);

// Text for a message: at most 80 bytes of it, and what cannot be printed replaced.
std::string shown(std::string_view text);

}  // namespace roundpipe::files
