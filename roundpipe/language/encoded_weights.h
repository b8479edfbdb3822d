#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/language/config.h>
#include <roundpipe/language/layers.h>
#include <roundpipe/language/options.h>
#include <roundpipe/language/weight_files.h>
#include <roundpipe/quantise/encoded_tensor.h>

namespace roundpipe::language {

struct EncodedWeight {
  quantise::Encoding encoding;
  std::vector<int64_t> sizes;  // of the weight
};

// The weights of a model that are encoded, by their names in it.
using EncodedWeights = std::map<std::string, EncodedWeight>;

// What is to be encoded: the weights of linear layers and of experts in the decoder layers, but for those that the
// options keep or that the format has no form for. Throws std::invalid_argument for an unknown format, a name that
// keeps nothing, and if nothing is left. Their dtype is not set.
EncodedWeights weights_to_encode(const Config& config, const QuantiseOptions& options);

// What files hold encoded. `stacked`: whether they hold experts so. Throws std::invalid_argument if that is another
// weight, another dtype, or some of a layer's experts. REQUIRES: files.check().
EncodedWeights encoded_in(const WeightFiles& files, const Config& config, bool stacked, c10::ScalarType dtype);

// Reads one of these into its parts in a model. `progress` as of WeightFiles::read.
void read_encoded(const WeightFiles& files, const std::string& name, bool stacked, const EncodedWeight& weight,
                  const std::vector<at::Tensor>& parts, const std::function<void(int64_t)>& progress);

}  // namespace roundpipe::language
