#include "metrics.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include <roundpipe/core/error.h>

namespace roundpipe::train {

namespace {

constexpr const char* kName = "metrics.jsonl";

// The step that a line is about; -1 for one that was torn.
int64_t step_of(const std::string& line) {
  const nlohmann::json parsed = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  const auto step = parsed.is_object() ? parsed.find("step") : parsed.end();
  return step != parsed.end() && step->is_number_integer() ? step->get<int64_t>() : -1;
}

}  // namespace

Metrics::Metrics(const std::string& folder, int64_t step) : path_(folder + "/" + kName) {
  std::string kept;
  std::ifstream before(path_);
  for (std::string line; std::getline(before, line);) {
    const int64_t about = step_of(line);
    if (about >= 0 && about <= step) kept += line + "\n";
  }
  const std::string aside = path_ + ".new";
  std::ofstream file(aside, std::ios::trunc);
  file << kept;
  file.close();
  if (!file) throw Error(concat("[train] ", aside, " cannot be written; free some space there"));
  std::filesystem::rename(aside, path_);
}

void Metrics::add(int64_t step, const std::vector<std::pair<std::string, double>>& values) {
  nlohmann::ordered_json line = {{"step", step}};
  for (const auto& [name, value] : values) line[name] = value;
  std::ofstream file(path_, std::ios::app);
  file << line.dump() << "\n";
  file.close();
  if (!file) throw Error(concat("[train] ", path_, " cannot be written; free some space there"));
}

}  // namespace roundpipe::train
