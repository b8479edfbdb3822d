#include <roundpipe/command/step_record.h>

#include <cstdio>

#include <nlohmann/json.hpp>

#include <roundpipe/core/error.h>

namespace roundpipe {

namespace {

template <typename... Values>
std::string printed(const char* format, Values... values) {
  std::string text(static_cast<size_t>(std::snprintf(nullptr, 0, format, values...)), '\0');
  std::snprintf(text.data(), text.size() + 1, format, values...);
  return text;
}

// "13,702"
std::string with_thousands(double number) {
  std::string text = printed("%.0f", number);
  const size_t first = text.find_first_of("0123456789");
  if (first == std::string::npos) return text;  // inf or NaN
  for (size_t at = text.size(); at > first + 3;) text.insert(at -= 3, 1, ',');
  return text;
}

// "6.10 GB", "12.35 MB": of a small model, too, more than zeros.
std::string with_unit(int64_t bytes) {
  const bool is_large = bytes >= 100'000'000;
  return printed(is_large ? "%.2f GB" : "%.2f MB", static_cast<double>(bytes) / (is_large ? 1e9 : 1e6));
}

}  // namespace

Metrics StepRecord::metrics() const {
  Metrics all = {
      {"loss", loss},     {"grad_norm", grad_norm}, {"learning_rate", learning_rate}, {"seconds", seconds},
      {"tokens", tokens}, {"devices_busy", {}},     {"device_bytes", device_bytes},   {"host_bytes", host_bytes}};
  if (busy) all[5].second = *busy;
  if (loss_scale) {
    all.emplace_back("loss_scale", *loss_scale);
    all.emplace_back("skipped_steps", skipped_steps);
  }
  if (accuracy) all.emplace_back("accuracy", *accuracy);
  return all;
}

std::string StepRecord::text() const {
  std::string all = printed("loss %.4f  ", loss) + (accuracy ? printed("%.0f%% right  ", *accuracy * 100) : "") +
                    printed("norm %.3g  rate %.3g  ", grad_norm, learning_rate) + with_thousands(tokens_per_s()) +
                    " tokens/s";
  if (busy) all += printed("  devices %.0f%% busy", *busy * 100);
  if (loss_scale) all += printed("  scale %g  skipped ", *loss_scale) + std::to_string(skipped_steps);
  return all + "  " + with_unit(device_bytes) + " a device, " + with_unit(host_bytes) + " host";
}

Metrics EvaluationRecord::metrics() const {
  if (!accuracy) return {{"evaluation_loss", loss}, {"evaluation_tokens", counted}};
  return {{"evaluation_loss", loss}, {"evaluation_accuracy", *accuracy}, {"evaluation_answers", counted}};
}

std::string EvaluationRecord::text() const {
  const std::string right = accuracy ? printed(", %.0f%% right", *accuracy * 100) : "";
  return concat("after ", step, " steps: held-out loss ") + printed("%.4f", loss) + right;
}

std::string metrics_line(int64_t step, const Metrics& metrics) {
  nlohmann::ordered_json line = {{"step", step}};
  for (const auto& [name, value] : metrics) {
    line[name] = nullptr;
    if (const auto* const count = std::get_if<int64_t>(&value)) line[name] = *count;
    if (const auto* const number = std::get_if<double>(&value)) line[name] = *number;
  }
  return line.dump();
}

}  // namespace roundpipe
