#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace roundpipe {

// The numbers of a line in metrics.jsonl, by name and in order; none: not known.
using Metrics = std::vector<std::pair<std::string, std::variant<std::monostate, int64_t, double>>>;

// A completed step of a run. Of several processes, tokens and loss are those of all, and the busy share and the memory
// those of this one.
struct StepRecord {
  int64_t step = 0;
  double loss = 0;
  double grad_norm = 0;
  double learning_rate = 0;
  double seconds = 0;
  int64_t tokens = 0;  // in its batch, with padding between samples of a row
  // The share of the latest steps' time in which the devices computed, from 0 to 1; none: not measured.
  std::optional<double> busy = std::nullopt;
  int64_t device_bytes = 0;  // most memory that any device has had in use
  int64_t host_bytes = 0;    // of the process, now
  // By which its loss was multiplied, of which `loss` shows nothing; none: no weights are in float16.
  std::optional<double> loss_scale = std::nullopt;
  int64_t skipped_steps = 0;  // of the run up to this one: changed nothing, as a gradient was inf or NaN
  // Of answers that are compared: the share that the model is right about, from 0 to 1.
  std::optional<double> accuracy = std::nullopt;

  double tokens_per_s() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
  Metrics metrics() const;
  // For people: "loss 2.1934  norm 1.37  rate 1.2e-05  13,702 tokens/s  6.10 GB a device, 34.20 GB host".
  std::string text() const;
};

// An evaluation after `step` steps: the mean loss of what counts of held-out data, which is tokens or, with an
// accuracy, pairs or answers.
struct EvaluationRecord {
  int64_t step = 0;
  double loss = 0;
  int64_t counted = 0;
  std::optional<double> accuracy = std::nullopt;

  Metrics metrics() const;
  // "after 12 steps: held-out loss 2.1934", "after 12 steps: held-out loss 0.6214, 71% right"
  std::string text() const;
};

// A line of metrics.jsonl: JSON, in which NaN and infinities are null.
std::string metrics_line(int64_t step, const Metrics& metrics);

}  // namespace roundpipe
