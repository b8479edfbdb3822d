#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/language/layers.h>

namespace roundpipe::language {

// The matrices of experts: stacked, as layers compute with them ("mlp.experts.gate_up_proj" and
// "mlp.experts.down_proj", the first size is the expert), and one by one, as transformers writes them
// ("mlp.experts.0.gate_proj.weight").

// The names and shapes one by one; other weights stay as they are.
std::vector<WeightShape> one_by_one(const std::vector<WeightShape>& stacked);
// The same of tensors: views.
std::vector<std::pair<std::string, at::Tensor>> one_by_one(
    const std::vector<std::pair<std::string, at::Tensor>>& stacked);

}  // namespace roundpipe::language
