#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/runtime/call/run_options.h>

namespace roundpipe::runtime {

// One value among the inputs or the labels of a call, as the rules of cutting see it.
struct BatchLeaf {
  enum class Role { kArgument, kKeyword, kLabel };

  std::string name;                 // in messages, such as "tensor 0"
  std::vector<int64_t> shape = {};  // of a tensor; empty: it has no dimensions, and is not cut
  Cut cut = {};
  // Whose rows are the batch's: the arguments'; without any, the keywords'; without these, the labels'.
  Role role = Role::kArgument;
  // Not a tensor, but values that the caller has cut: for how many microbatches; 0: a tensor.
  int ready = 0;
  // The rows of each of these values; empty: not all are tensors with rows.
  std::vector<int64_t> ready_rows = {};
  // Not a tensor, but a sequence of so many plain numbers; 0: a tensor.
  int64_t numbers = 0;
};

// The dimension of a tensor that is cut as the caller says; -1: it is not. Throws std::invalid_argument for Cut::along
// with a dimension that the tensor does not have.
int64_t given_dimension(const BatchLeaf& leaf, const char* where);

// How one leaf goes to the microbatches.
struct LeafCut {
  int64_t dimension = -1;           // -1: every microbatch gets the leaf whole
  std::vector<int64_t> sizes = {};  // of each microbatch's part along `dimension`
};

// The number of rows in each microbatch; none: nothing tells.
using MicrobatchRows = std::optional<std::vector<int64_t>>;

// The inputs of one call on their way to microbatches.
//
// The rows of the batch are those of the first tensor that is cut along a given dimension, else the most frequent size
// of dimension 0, of which the first wins a tie. Tensors that are cut automatically are those with as many rows as the
// batch. Beside values that the caller has cut, they are cut by the rows of these.
class InputCut {
 public:
  // Throws std::invalid_argument for Cut::along with a dimension that a tensor does not have.
  explicit InputCut(std::vector<BatchLeaf> leaves);

  // How many microbatches there are: the wanted number, else the default one; at most as many as there are rows. If
  // nothing is cut, the wanted number, else 1. At least 1, also for a batch without rows.
  int count(std::optional<int> wanted, int by_default) const;

  // Throws std::invalid_argument if the batch is empty, if a leaf has fewer rows than there are microbatches or was cut
  // into fewer, or, for more than one microbatch, if a label does not have the rows of the batch.
  std::vector<LeafCut> cut(int count) const;

  // REQUIRES: cut(count) does not throw.
  MicrobatchRows rows(int count) const;

  // A warning that names the tensors that go whole to every microbatch although nobody said so; empty: there are none.
  // A tensor of one row stands for all rows.
  std::string doubts() const;

 private:
  int64_t size(size_t leaf) const { return leaves_[leaf].shape[static_cast<size_t>(dimensions_[leaf])]; }
  void choose(const std::vector<size_t>& automatic);

  std::vector<BatchLeaf> leaves_;
  std::vector<int64_t> dimensions_;  // of each leaf; -1: whole
  std::vector<size_t> doubtful_;
  int64_t batch_ = -1;  // rows; -1: unknown
  std::vector<int64_t> ready_rows_;
};

// The rows of microbatches that the caller has cut, from their leaves.
MicrobatchRows rows_of(const std::vector<std::vector<BatchLeaf>>& microbatches);

// How labels go to `count` microbatches whose inputs have `rows`. A tensor that is cut automatically has a row for each
// row of the batch, and goes where that goes. So have the parts of a label that the caller has cut, unless it is said
// to be whole. A single row beside other labels stands for all rows. If nobody knows the rows of the inputs, tensors
// are cut as at::tensor_split cuts. Throws std::invalid_argument for another number of rows, also if there is only one
// microbatch; for tensors that disagree; for a tensor with fewer rows than microbatches; and, if there are several, for
// a sequence of numbers, which nothing cuts.
std::vector<LeafCut> cut_labels(const std::vector<BatchLeaf>& labels, const MicrobatchRows& rows, int count);

}  // namespace roundpipe::runtime
