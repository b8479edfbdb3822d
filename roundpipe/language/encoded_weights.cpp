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
  const std::vector<WeightShape> shapes = weight_shapes(config);
  std::vector<std::string> modules;
  for (const auto& [name, shape] : shapes) modules.push_back(module_of(name));
  quantise::require_modules(options.keep, modules);
  EncodedWeights found;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto keeps = [&](const std::string& name) { return quantise::is_name_of(name, modules[i]); };
    const auto& [name, shape] = shapes[i];
    if (is_matrix(name) && std::ranges::none_of(options.keep, keeps) && format.reason_against(shape).empty())
      found.emplace(name, shape);
  }
  if (found.empty()) throw std::invalid_argument("[language model] quantise leaves nothing to be encoded");
  return found;
}

}  // namespace roundpipe::language
