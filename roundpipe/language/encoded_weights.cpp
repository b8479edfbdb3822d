#include <roundpipe/language/encoded_weights.h>

#include <algorithm>
#include <stdexcept>

#include <ATen/core/grad_mode.h>

#include <roundpipe/core/error.h>
#include <roundpipe/language/experts.h>
#include <roundpipe/quantise/module_names.h>

namespace roundpipe::language {

using at::Tensor;
using quantise::Encoding;
using quantise::StoredWeight;

namespace {

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw std::invalid_argument(concat("[language model] ", parts...));
}

// Of a decoder layer's linear layers and experts.
bool is_matrix(const std::string& name) { return name.ends_with("_proj.weight") || name.ends_with("_proj"); }

std::string module_of(const std::string& name) { return name.substr(0, name.rfind('.')); }

// The encoding of one weight, or of a stack of them.
Encoding encoding_of(const std::string& name, const StoredWeight& stored, bool is_piece, c10::ScalarType dtype) {
  try {
    const Encoding encoding = stored.encoding(dtype);
    return is_piece ? encoding.of_stack(stored.sizes().back()) : encoding;
  } catch (const std::invalid_argument& error) {
    refuse(name, " ", error.what());
  }
}

}  // namespace

EncodedWeights weights_to_encode(const Config& config, const QuantiseOptions& options) {
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
      found.emplace(name, EncodedWeight{{.format = &format}, shape});
  }
  if (found.empty()) throw std::invalid_argument("[language model] quantise leaves nothing to be encoded");
  return found;
}

EncodedWeights encoded_in(const WeightFiles& files, const Config& config, bool stacked, c10::ScalarType dtype) {
  EncodedWeights found;
  for (const WeightShape& weight : weight_shapes(config)) {
    const std::vector<WeightShape> pieces = stacked ? std::vector{weight} : one_by_one({weight});
    const bool is_encoded = files.encoded().contains(pieces.front().name);
    for (const WeightShape& piece : pieces) {
      const auto stored = files.encoded().find(piece.name);
      if ((stored != files.encoded().end()) != is_encoded) {
        refuse("of ", pieces.front().name, " and ", piece.name, " one is encoded, expected all or none of ",
               weight.name, "; quantise the plain model again");
      }
      if (!is_encoded) continue;
      if (!is_matrix(weight.name))
        refuse(weight.name,
               " is encoded, and only linear layers and experts may be; load the plain model with quantise");
      const Encoding encoding = encoding_of(piece.name, stored->second, pieces.size() > 1, dtype);
      const auto [place, is_new] = found.emplace(weight.name, EncodedWeight{encoding, weight.shape});
      if (place->second.encoding.format != encoding.format) {
        refuse(piece.name, " is encoded as ", encoding.format->name(), ", expected ",
               place->second.encoding.format->name(), " as in the rest of ", weight.name);
      }
    }
  }
  return found;
}

void read_encoded(const WeightFiles& files, const std::string& name, bool stacked, const EncodedWeight& weight,
                  const std::vector<Tensor>& parts, const std::function<void(int64_t)>& progress) {
  const at::NoGradGuard no_grad;
  const std::vector<WeightShape> pieces = stacked ? std::vector<WeightShape>() : one_by_one({{name, weight.sizes}});
  if (pieces.size() < 2) {
    const std::vector<Tensor> read = files.read_parts(name, progress);
    for (size_t i = 0; i < parts.size(); ++i) parts[i].copy_(read[i]);
    return;
  }
  const Tensor& codes = parts[0];
  std::vector<int64_t> rows = codes.sizes().vec();
  rows.back() = -1;
  const auto into_codes = one_by_one({{name, codes}}), into_scales = one_by_one({{name, parts[1].view(rows)}});
  for (size_t i = 0; i < pieces.size(); ++i) {
    const StoredWeight& stored = files.encoded().at(pieces[i].name);
    const quantise::Format& format = *stored.encoding(weight.encoding.dtype).format;
    const auto [flat, read] = format.flat(files.read_parts(pieces[i].name, progress));
    into_codes[i].second.copy_(read[0]);
    into_scales[i].second.copy_(read[1].view(into_scales[i].second.sizes()));
  }
}

}  // namespace roundpipe::language
