#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/saving/stored_checkpoint.h>

namespace roundpipe {

// Elements of a parameter, counted in the order of its memory: the first, and the one after the last.
using ElementsOf = std::pair<int64_t, int64_t>;
// These elements of a dense tensor, in one dimension; the tensor itself for none. Shares memory.
at::Tensor own_elements(const at::Tensor& tensor, const std::optional<ElementsOf>& range);

// Reads an optimizer's state from the parts in which nodes have written it, in the parts in which it is needed now.
// Nothing is read before read(). Whatever does not belong together is damage. The checkpoint outlives this. Thread
// safety: one thread.
class StateReads {
 public:
  // `in_parts`: reads nothing but what is asked for, and verifies nothing, so that a state can be read piece by piece.
  // Then whole_tensors() is empty.
  explicit StateReads(const StoredCheckpoint& stored, bool in_parts = false) : stored_(stored), in_parts_(in_parts) {}

  // Reads the state `kind` of the parameter `name` into `target`, which has the elements of `range`, in the order of
  // memory; or, for none, in a process that loads alone, all. `like` has the parameter's shape and strides. Throws
  // std::invalid_argument if it had another layout in memory, in which its 8-bit state was made.
  void take(const std::string& name, const std::string& kind, const at::Tensor& target, const at::Tensor& like,
            const std::optional<ElementsOf>& range);
  // A new tensor that takes all elements of a parameter's state, in the parameter's shape unless the state has another.
  at::Tensor whole(const std::string& name, const std::string& kind, at::IntArrayRef shape);

  // Tensors that are read from their first byte to their last, by name; the caller reads them.
  const std::vector<std::pair<std::string, at::Tensor>>& whole_tensors() const { return whole_tensors_; }
  // Reads the rest. Files that are read in part are not verified: StoredCheckpoint::verify_rest does that.
  void read();

 private:
  // How a stored tensor counts the elements of its parameter.
  struct Unit {
    int64_t elements = 1;  // of the parameter, for each of the tensor
    int64_t block = 1;     // of the parameter, that the tensor has in whole, filled up at the end

    int64_t index(int64_t first) const { return first / elements; }
    int64_t end(int64_t last) const { return (last + block - 1) / block * block / elements; }
  };
  Unit unit_of(const std::string& key) const;
  bool has_memory_order(const std::string& name, const at::Tensor& like, const Unit& unit) const;
  void add(const std::string& key, const at::Tensor& flat, ElementsOf range, int64_t elements, const Unit& unit);

  const StoredCheckpoint& stored_;
  const bool in_parts_;
  std::vector<std::pair<std::string, at::Tensor>> whole_tensors_;
  StoredCheckpoint::FileRanges ranges_;
  std::vector<std::function<void()>> afterwards_;
};

}  // namespace roundpipe
