#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <roundpipe/models/decoder_layer.h>

#include "python_values.h"

namespace roundpipe::python {

// One microbatch's way through the native layers of a chain: how each is called. Python makes it once the first layer
// has run. The structure of what a native layer hands on is made only if a Python layer takes it.
class Passage : public std::enable_shared_from_this<Passage> {
 public:
  // `calls`: by number; none: the Python layer runs. `structure_after(number)` makes the structure of what that call
  // hands on. REQUIRES: the interpreter lock.
  Passage(std::vector<std::optional<models::DecoderCall>> calls, pybind11::object structure_after)
      : calls_(std::move(calls)), after_(calls_.size()) {
    const SharedObject make = share(std::move(structure_after));
    for (size_t number = 0; number < calls_.size(); ++number) {
      after_[number] = {make, number, this, nullptr};
      if (calls_[number]) calls_[number]->structure = &after_[number];
    }
  }
  Passage(const Passage&) = delete;
  Passage& operator=(const Passage&) = delete;

  // Null: not native. The call lives as long as the passage. Any thread.
  const models::DecoderCall* call(size_t number) const {
    return number < calls_.size() && calls_[number] ? &*calls_[number] : nullptr;
  }

 private:
  std::vector<std::optional<models::DecoderCall>> calls_;
  std::vector<PythonStructure> after_;
};

}  // namespace roundpipe::python
