#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/mutex.h>
#include <roundpipe/runtime/call/run_options.h>
#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::runtime {

// The message for a NaN loss; `which` names it: " of microbatch 2".
std::string nan_loss(const std::string& which);

// One microbatch, as a loss sees it.
struct LossRows {
  int64_t rows = 1;
  int64_t dimension = 0;  // along which rows lie in the inputs, and so in outputs, if they have as many there
  // Of each tensor of the label: the dimension along which its rows lie; -1: it is the same for all rows.
  std::vector<int64_t> label_dimensions;
  // Of each row, the number of labels that are not negative; empty: none is, in any microbatch. See count_labels.
  std::vector<int64_t> counted;
};

// Fills in LossRows::counted, if an integer label with rows is negative somewhere, as those are that libtorch's losses
// leave out of their means (ignore_index, -100 by default). `labels`: of each microbatch, on the host.
void count_labels(std::vector<LossRows>& microbatches, const std::vector<Values>& labels);

// The loss function of one call, whose results get their weights in the loss of the batch.
//
// What it is shows on the first microbatch: the losses of two parts of its rows, beside that of all of them, tell a
// mean from a sum. A single row is doubled instead. A microbatch whose loss and gradients are zero or NaN does not
// tell; then the next one is tried. A mean is over rows or, if labels are negative, over those that are not. What is
// neither a sum nor a mean is left as a sum is, and notice() says so. Thread safety: any thread; one microbatch after
// the other while is_open().
class TriedLoss final : public Loss {
 public:
  using Function = std::function<std::vector<at::Tensor>(const Values& outputs, const Values& label)>;

  // `given`: what it is, so that nothing is tried. Nor is it for a single microbatch.
  TriedLoss(Function function, std::vector<LossRows> microbatches, std::optional<LossReduction> given);

  // Whether a microbatch has to tell.
  bool is_open() const override;
  // The losses of a microbatch, with their weights. If it has to tell, calls the function twice more, once for a single
  // row; three times more still if these losses cancel out. Throws what the function throws, but not on parts.
  std::vector<at::Tensor> operator()(const Values& outputs, const Values& label, const LayerContext& context) override;
  // What the user should know; empty: nothing.
  std::string notice() const override;

 private:
  enum class Kind { kSum, kMeanOfRows, kMeanOfLabels, kOther };
  struct Part;
  struct Trial;
  Part evaluate(const Values& outputs, const Values& label, const LossRows& rows, int64_t first, int64_t end) const;
  Trial try_parts(const Values& outputs, const Values& label, const LayerContext& context) const;
  void conclude(const Trial& trial, const std::vector<at::Tensor>& losses);
  std::vector<std::optional<Kind>> kinds_of(size_t losses) const;
  at::Tensor weighted(const at::Tensor& loss, std::optional<Kind> kind, const LossRows& microbatch) const;

  const Function function_;
  const std::vector<LossRows> microbatches_;
  const std::optional<LossReduction> given_;
  int64_t rows_ = 0;
  int64_t counted_ = 0;
  mutable Mutex mutex_;
  bool open_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::vector<std::optional<Kind>> kinds_ ROUNDPIPE_GUARDED_BY(mutex_);  // of each loss; empty: none is known
  std::string notice_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace roundpipe::runtime
