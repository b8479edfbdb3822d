#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe {

// A tensor in one of a checkpoint's files.
struct StoredTensor {
  std::string file;
  c10::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  int64_t bytes = 0;
};
// Those of one kind of files, by their names there.
using StoredSection = std::map<std::string, StoredTensor>;
// By the kind: "model", "optimizer", ...
using StoredSections = std::map<std::string, StoredSection>;

}  // namespace roundpipe
