#pragma once

#include <array>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <roundpipe/api/values.h>
#include <roundpipe/runtime/call/run_options.h>

namespace roundpipe::runtime {
struct LossRows;
}

namespace roundpipe {

// A batch that the caller has cut: one value for each microbatch. Takes the place of the inputs or of the labels of a
// call, if rows of one dimension are not how a batch is to be cut.
template <typename T>
struct Microbatches {
  std::vector<T> values;
};

namespace detail {

template <typename T>
struct IsCut : std::false_type {};
template <typename T>
struct IsCut<Microbatches<T>> : std::true_type {};

// A row of plain numbers or texts, which nothing cuts; see runtime::BatchLeaf::numbers.
template <typename T>
struct IsNumbers : std::false_type {};
template <typename T>
struct IsNumbers<std::vector<T>> : std::bool_constant<kHoldsNone<T>> {};
template <typename T, size_t n>
struct IsNumbers<std::array<T, n>> : std::bool_constant<kHoldsNone<T>> {};

// Inputs or labels on their way to the engine: whole, or already cut.
struct Batch {
  std::vector<runtime::Values> parts;
  bool is_cut = false;
  int64_t numbers = 0;  // the whole is a row of so many numbers; 0: of none
};
// `is_call`: a tuple is the arguments of a call.
template <typename T>
Batch batch_of(T value, bool is_call) {
  Batch batch;
  if constexpr (IsCut<T>::value) {
    batch.is_cut = true;
    for (auto& part : value.values) batch.parts.push_back(split(std::move(part), is_call));
  } else {
    if constexpr (IsNumbers<T>::value) batch.numbers = static_cast<int64_t>(value.size());
    batch.parts.push_back(split(std::move(value), is_call));
  }
  return batch;
}

// Moves tensors to the host; autograd keeps track. Throws std::invalid_argument for a tensor that has no data there or
// is not dense and strided. `where`: begins the message.
Batch on_host(Batch batch, const char* where);

// How many microbatches the inputs make. Inputs that are cut decide it. Otherwise it is the number that `options` ask
// for, else `by_default`; at most the batch's rows. Throws std::invalid_argument if there are none.
int count_of(const Batch& inputs, const RunOptions& options, int by_default);

// Cuts inputs into `count` parts: views, so gradients flow back; see runtime::InputCut. Warns of tensors that go whole
// to every microbatch for their size alone. Throws std::invalid_argument as that does, and for another number of parts
// in a batch that is cut.
std::vector<runtime::Values> cut_inputs(const Batch& inputs, int count, const std::vector<Cut>& cuts);

// The same for labels; see runtime::cut_labels.
std::vector<runtime::Values> cut_labels(const Batch& labels, const Batch& inputs, int count, const RunOptions& options);

// The microbatches as a loss sees them. `inputs`, `labels`: of each, and how they were cut.
std::vector<runtime::LossRows> loss_rows(const std::vector<runtime::Values>& inputs, const std::vector<Cut>& input_cuts,
                                         const std::vector<runtime::Values>& labels,
                                         const std::vector<Cut>& label_cuts);

// Puts the outputs of microbatches together: tensors with dimensions are concatenated along dimension 0, scalars
// averaged; truth values have to agree. What is not a tensor is taken from the first microbatch. Throws
// std::invalid_argument if the microbatches returned different types or numbers of tensors, or tensors that cannot be
// concatenated.
runtime::Values merged(const std::vector<runtime::Values>& outputs, c10::Device device);

}  // namespace detail
}  // namespace roundpipe
