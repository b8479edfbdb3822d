#include "data.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include <roundpipe/core/error.h>
#include <roundpipe/language/token_batches.h>

namespace roundpipe::train {

using tokens::RowKind;
using tokens::TokenFile;

namespace {

void check_vocabulary(const TokenFile& file, const language::Config& config) {
  if (file.vocabulary() <= config.vocabulary) return;
  throw std::invalid_argument(concat("[train] ", file.path(), " has a vocabulary of ", file.vocabulary(),
                                     " tokens, expected at most the model's ", config.vocabulary,
                                     "; make the file with the model's own tokenizer"));
}

}  // namespace

Data::Data(const Options& options, const language::Config& config)
    : file_(options.tokens),
      rows_of_a_step_(tokens_of_step(options) / options.length),
      steps_(options.steps.value_or(0)) {
  check_vocabulary(file_, config);
  if (options.length > config.max_positions) {
    throw std::invalid_argument(concat("[train] --length is ", options.length, ", expected at most ",
                                       config.max_positions, ", the max_position_embeddings of the model"));
  }
  const RowKind kind = tokens::parse_row_kind(options.rows);
  const tokens::Parts parts = tokens::part_documents(file_, options.evaluation_tokens, options.seed);
  training_.emplace(file_, parts.training, options.length, kind);
  // Every document is evaluated, whole rows or not.
  const RowKind evaluated = kind == RowKind::kStream ? RowKind::kPacked : kind;
  if (!options.evaluation_file.empty()) {
    evaluation_file_ = std::make_unique<TokenFile>(options.evaluation_file);
    check_vocabulary(*evaluation_file_, config);
    const std::vector<int64_t> all = tokens::part_documents(*evaluation_file_, 0).training;
    held_out_.emplace(*evaluation_file_, all, options.length, evaluated);
  } else if (!parts.held_out.empty()) {
    held_out_.emplace(file_, parts.held_out, options.length, evaluated);
  }
  order_.emplace(training_->count(), options.seed, !options.in_order);
  if (steps_ > 0) return;
  const double steps = options.epochs * static_cast<double>(training_->count()) / static_cast<double>(rows_of_a_step_);
  steps_ = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(steps)));
}

LanguageBatch Data::batch(int64_t step) {
  std::vector<std::vector<tokens::Piece>> rows;
  for (int64_t i = 0; i < rows_of_a_step_; ++i) rows.push_back(training_->row(order_->at(step * rows_of_a_step_ + i)));
  return read_batch(file_, rows, training_->kind());
}

LanguageBatch Data::held_out_batch(int64_t first) const {
  const int64_t end = std::min(first + rows_of_a_step_, held_out_->count());
  std::vector<std::vector<tokens::Piece>> rows;
  for (int64_t i = first; i < end; ++i) rows.push_back(held_out_->row(i));
  return read_batch(evaluation_file_ ? *evaluation_file_ : file_, rows, held_out_->kind());
}

void Data::verify() const {
  file_.verify();
  if (evaluation_file_) evaluation_file_->verify();
}

}  // namespace roundpipe::train
