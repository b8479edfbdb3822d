#include <roundpipe/command/step_lines.h>

#include <fstream>
#include <utility>

#include <nlohmann/json.hpp>

#include <roundpipe/core/error.h>

namespace roundpipe {

namespace {

// The step that a line is about; -1 for one that was torn.
int64_t step_of(const std::string& line) {
  const nlohmann::json parsed = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  const auto step = parsed.is_object() ? parsed.find("step") : parsed.end();
  return step != parsed.end() && step->is_number_integer() ? step->get<int64_t>() : -1;
}

std::vector<std::string> kept_lines(const std::string& path, int64_t after_step) {
  std::vector<std::string> kept;
  if (after_step == 0) return kept;
  std::ifstream before(path);
  for (std::string line; std::getline(before, line);) {
    const int64_t step = step_of(line);
    if (step >= 0 && step <= after_step) kept.push_back(line);
  }
  return kept;
}

// Replaces what is at `path` in one step.
files::File replaced(const std::string& path, const std::string& text, files::FileSystem& files) {
  const std::string aside = path + ".new";
  files::File file = files.open_to_update(aside);
  file.truncate(0);
  file.write(0, text.data(), static_cast<int64_t>(text.size()));
  file.close();
  files.rename(aside, path);
  return files.open_to_update(path);
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

}  // namespace

StepLines::StepLines(const std::string& path, int64_t after_step, Tell tell, files::FileSystem& files)
    : tell_(std::move(tell)), lines_(kept_lines(path, after_step)), file_(replaced(path, joined(lines_), files)) {
  written_bytes_ = file_.size();
}

void StepLines::add(const std::string& line) {
  lines_.push_back(line);
  unwritten_ += line + "\n";
  const auto bytes = static_cast<int64_t>(unwritten_.size());
  try {
    file_.write(written_bytes_, unwritten_.data(), bytes);
  } catch (const Error& error) {
    if (!std::exchange(has_told_, true)) {
      tell_(concat("[train] a line waits: ", error.what(),
                   "; training goes on, and its lines are written when there is room"));
    }
    return;
  }
  written_bytes_ += bytes;
  unwritten_.clear();
}

}  // namespace roundpipe
