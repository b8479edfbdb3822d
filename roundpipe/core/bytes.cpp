#include <roundpipe/core/bytes.h>

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <utility>

#include <roundpipe/core/error.h>

namespace roundpipe {
namespace {

struct Number {
  double value;
  std::string_view unit;
};

Number split_number(std::string_view text, std::string_view where, std::string_view expected) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || !std::isfinite(value) || value < 0) {
    throw std::invalid_argument(concat("[", where, "] '", text, "' is not ", expected));
  }
  std::string_view unit = text.substr(static_cast<size_t>(end - text.data()));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  return {value, unit};
}

constexpr std::array<std::pair<std::string_view, double>, 9> kUnits{{{"B", 1.0},
                                                                     {"KiB", 1024.0},
                                                                     {"MiB", 1048576.0},
                                                                     {"GiB", 1073741824.0},
                                                                     {"TiB", 1099511627776.0},
                                                                     {"KB", 1e3},
                                                                     {"MB", 1e6},
                                                                     {"GB", 1e9},
                                                                     {"TB", 1e12}}};

}  // namespace

int64_t parse_bytes(std::string_view text, std::string_view where) {
  constexpr std::string_view kExpected = "a size with its unit; write for example 2GiB, 512MiB or 1000000B";
  const auto [value, unit] = split_number(text, where, kExpected);
  if (value == 0 && unit.empty()) return 0;
  for (const auto& [name, factor] : kUnits) {
    if (unit == name && value * factor < 9e18) return static_cast<int64_t>(std::llround(value * factor));
  }
  throw std::invalid_argument(concat("[", where, "] '", text, "' is not ", kExpected));
}

double parse_gb_per_s(std::string_view text, std::string_view where) {
  constexpr std::string_view kExpected = "a bandwidth; write for example 8GB/s";
  const auto [value, unit] = split_number(text, where, kExpected);
  if (value > 0 && (unit.empty() || unit == "GB/s")) return value;
  if (value > 0 && unit == "MB/s") return value / 1e3;
  throw std::invalid_argument(concat("[", where, "] '", text, "' is not ", kExpected));
}

double parse_ms(std::string_view text, std::string_view where) {
  constexpr std::string_view kExpected = "a time; write for example 0.8ms";
  const auto [value, unit] = split_number(text, where, kExpected);
  if (value >= 0 && (unit.empty() || unit == "ms")) return value;
  if (value >= 0 && unit == "us") return value / 1e3;
  throw std::invalid_argument(concat("[", where, "] '", text, "' is not ", kExpected));
}

double parse_duration_ms(std::string_view text, std::string_view where) {
  constexpr std::string_view kExpected = "a time above 0 with its unit; write for example 30s or 5ms";
  constexpr std::array<std::pair<std::string_view, double>, 4> kTimes{
      {{"us", 1e-3}, {"ms", 1.0}, {"s", 1e3}, {"min", 6e4}}};
  const auto [value, unit] = split_number(text, where, kExpected);
  for (const auto& [name, factor] : kTimes) {
    if (value > 0 && unit == name && value * factor < 1e12) return value * factor;
  }
  throw std::invalid_argument(concat("[", where, "] '", text, "' is not ", kExpected));
}

std::string format_bytes(int64_t size_bytes) {
  constexpr std::array<const char*, 5> kNames{"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(size_bytes);
  size_t name = 0;
  while (std::abs(value) >= 1024.0 && name + 1 < kNames.size()) {
    value /= 1024.0;
    ++name;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), name == 0 ? "%.0f %s" : "%.2f %s", value, kNames[name]);
  return text.data();
}

}  // namespace roundpipe
