#pragma once

#include <fstream>
#include <string>
#include <vector>

namespace roundpipe::bench {

// The options that all benchmarks share.
struct Options {
  bool quick = false;  // a few tiny sizes, to see that it runs; says nothing
  std::string out;     // also write the report to this file; empty: do not
};

// Exits with a message where an argument is unknown.
Options parse_options(int argc, char** argv);

// What every benchmark prints: the machine it ran on, and its tables in Markdown. Used by one thread.
class Report {
 public:
  // `program` as it is named in the command that is shown.
  Report(const std::string& title, const std::string& program, const Options& options);

  void line(const std::string& text);
  void table(const std::vector<std::string>& header, const std::vector<std::vector<std::string>>& rows);
  // Says how busy the machine was in the end.
  void close();

 private:
  std::ofstream out_;
};

// "12.345" with `digits` after the point.
std::string fixed(double value, int digits);

double median(std::vector<double> values);

}  // namespace roundpipe::bench
