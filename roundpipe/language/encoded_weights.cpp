#include <roundpipe/language/encoded_weights.h>

#include <algorithm>
#include <stdexcept>

#include <roundpipe/core/error.h>
#include <roundpipe/quantise/module_names.h>

namespace roundpipe::language {

namespace {

// Of a decoder layer's linear layers and experts.
bool is_matrix(const std::string& name) { return name.ends_with("_proj.weight") || name.ends_with("_proj"); }

std::string module_of(const std::string& name) { return name.substr(0, name.rfind('.')); }

}  // namespace

EncodedWeights encoded_weights(const Config& config, const QuantiseOptions& options) {
  const quantise::Format& format = quantise::find_format(options.format);
  EncodedWeights found;
  std::vector<char> is_used(options.keep.size(), 0);
  for (const auto& [name, shape] : weight_shapes(config)) {
    bool is_kept = false;
    for (size_t i = 0; i < options.keep.size(); ++i) {
      if (!quantise::is_name_of(options.keep[i], module_of(name))) continue;
      is_kept = true;
      is_used[i] = 1;
    }
    if (is_matrix(name) && !is_kept && format.reason_against(shape).empty()) found.emplace(name, shape);
  }
  const auto unused = std::ranges::find(is_used, 0);
  if (unused != is_used.end()) {
    throw std::invalid_argument(
        concat("[language model] keep names '", options.keep[static_cast<size_t>(unused - is_used.begin())],
               "', which is no module of the model, expected such as 'down_proj' or 'model.layers.0'"));
  }
  if (found.empty()) throw std::invalid_argument("[language model] quantise leaves nothing to be encoded");
  return found;
}

}  // namespace roundpipe::language
