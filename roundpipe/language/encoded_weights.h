#pragma once

#include <map>
#include <string>
#include <vector>

#include <roundpipe/language/config.h>
#include <roundpipe/language/layers.h>
#include <roundpipe/language/options.h>
#include <roundpipe/quantise/format.h>

namespace roundpipe::language {

// The weights of a model that are encoded, by their names in it, with their shapes.
using EncodedWeights = std::map<std::string, std::vector<int64_t>>;

// Those of linear layers and of experts in the decoder layers, but for those that the options keep or that the format
// has no form for. Throws std::invalid_argument for an unknown format, a name that keeps nothing, and if nothing is
// left.
EncodedWeights encoded_weights(const Config& config, const QuantiseOptions& options);

}  // namespace roundpipe::language
