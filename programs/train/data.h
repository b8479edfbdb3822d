#pragma once

#include <memory>
#include <optional>

#include <roundpipe/language/config.h>
#include <roundpipe/language/language_model.h>
#include <roundpipe/tokens/rows.h>

#include "options.h"

namespace roundpipe::train {

// The rows to train on and to evaluate on. Thread safety: one thread.
class Data {
 public:
  // Opens the files. Throws std::invalid_argument for options that do not fit them or the model, and Error for damaged
  // files.
  Data(const Options& options, const language::Config& config);

  const tokens::Rows& training() const { return *training_; }
  const std::optional<tokens::Rows>& held_out() const { return held_out_; }
  int64_t rows_of_a_step() const { return rows_of_a_step_; }
  // How many steps the options ask for.
  int64_t steps() const { return steps_; }
  // What tells these data from others.
  uint32_t checksum() const { return file_.checksum(); }

  // The batch of a step, counted from 0. It depends on the step and the options alone.
  LanguageBatch batch(int64_t step);
  // The held-out rows from `first` on, as many as a step has or fewer. REQUIRES: there are such rows.
  LanguageBatch held_out_batch(int64_t first) const;

  // Reads all tokens and compares their checksums. Throws Error.
  void verify() const;

 private:
  const tokens::TokenFile file_;
  std::unique_ptr<tokens::TokenFile> evaluation_file_;  // null: the same
  std::optional<tokens::Rows> training_, held_out_;
  std::optional<tokens::RowOrder> order_;
  int64_t rows_of_a_step_;
  int64_t steps_;
};

}  // namespace roundpipe::train
