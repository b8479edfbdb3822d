#pragma once

#include <optional>
#include <set>
#include <string>

#include <nlohmann/json.hpp>

namespace roundpipe::language {

// The fields of a JSON object, each of which is asked for or refused: a field that nobody knows may change what is
// computed. Errors are std::invalid_argument that name the field. Thread safety: one thread.
class JsonFields {
 public:
  // `where` begins messages. The object outlives this.
  JsonFields(const nlohmann::json& object, std::string where);

  // Whether a field is there and not null.
  bool has(const std::string& name);
  bool is_null(const std::string& name);
  // They refuse a field that is missing, unless there is an `otherwise`, or of another type.
  const nlohmann::json& at(const std::string& name);
  int64_t integer(const std::string& name, std::optional<int64_t> otherwise = {}, int64_t least = 1);
  double number(const std::string& name, std::optional<double> otherwise = {});
  double positive(const std::string& name, std::optional<double> otherwise = {});
  // From 0 to 1; 0 if there is none.
  double share(const std::string& name);
  bool flag(const std::string& name, bool otherwise);
  std::string text(const std::string& name, std::optional<std::string> otherwise = {});
  // Refuses a field unless it is not there, null or this.
  void must_be(const std::string& name, const nlohmann::json& expected);

  // Refuses what was not asked for, but for null and these.
  void refuse_others(const std::set<std::string>& ignored) const;
  [[noreturn]] void refuse(const std::string& what) const;
  [[noreturn]] void refuse(const std::string& name, const nlohmann::json& value, const std::string& expected) const;

 private:
  const nlohmann::json& object_;
  const std::string where_;
  std::set<std::string> taken_;
};

}  // namespace roundpipe::language
