#include "support/report.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <iomanip>
#include <iostream>
#include <sstream>

#include <torch/version.h>

#include <roundpipe/core/error.h>

namespace roundpipe::bench {
namespace {

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

int cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 0;
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::ostringstream text;
  text << std::put_time(std::localtime(&now), "%Y-%m-%d");
  return text.str();
}

double load_average() {
  double load = 0;
  getloadavg(&load, 1);
  return load;
}

}  // namespace

Options parse_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--quick") {
      options.quick = true;
    } else if (argument == "--out" && i + 1 < argc) {
      options.out = argv[++i];
    } else {
      std::cerr << "[bench] unknown argument '" << argument << "'; expected --quick or --out FILE\n";
      std::exit(2);
    }
  }
  return options;
}

Report::Report(const std::string& title, const std::string& program, const Options& options) {
  if (!options.out.empty()) out_.open(options.out);
  line("# " + title);
  line("");
  line("- date: " + today());
  line(concat("- CPU: ", cpu_model(), ", ", cores(), " cores"));
  line(concat("- versions: roundpipe ", ROUNDPIPE_VERSION, ", torch ", TORCH_VERSION, ", compiler ", __VERSION__));
  line(concat("- command: `", program, options.quick ? " --quick" : "",
              options.out.empty() ? "" : " --out " + options.out, "`"));
  line("- load average over the last minute when it began: " + fixed(load_average(), 1));
  line("");
}

void Report::line(const std::string& text) {
  std::cout << text << std::endl;
  if (out_.is_open()) out_ << text << '\n';
}

void Report::table(const std::vector<std::string>& header, const std::vector<std::vector<std::string>>& rows) {
  const auto joined = [](const std::vector<std::string>& cells) {
    std::string text = "|";
    for (const std::string& cell : cells) text += " " + cell + " |";
    return text;
  };
  line(joined(header));
  std::string rule = "|";
  for (size_t i = 0; i < header.size(); ++i) rule += "---:|";
  line(rule);
  for (const auto& row : rows) line(joined(row));
  line("");
}

void Report::close() { line("Load average over the last minute when it ended: " + fixed(load_average(), 1) + "."); }

std::string fixed(double value, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace roundpipe::bench
