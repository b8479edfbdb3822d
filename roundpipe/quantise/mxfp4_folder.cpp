#include <stdexcept>

#include <roundpipe/core/error.h>
#include <roundpipe/quantise/folder_layout.h>

namespace roundpipe::quantise {

namespace {

constexpr int64_t kMxBlockBytes = 16;
const std::string kBlocks = "_blocks", kScales = "_scales";

// X_blocks [.., rows, blocks, 16] of two codes each, and X_scales [.., rows, blocks]. A model of transformers has
// stacks of matrices the other way, [.., from, to].
bool is_transposed(at::IntArrayRef sizes) { return sizes.size() > 2; }

StoredWeights find_mxfp4(const nlohmann::json&, const FolderTensors& tensors) {
  const Format& format = find_format("mxfp4");
  StoredWeights found;
  for (const auto& [name, entry] : tensors.all()) {
    if (!name.ends_with(kBlocks)) continue;
    const std::string weight = name.substr(0, name.size() - kBlocks.size());
    const std::vector<int64_t>& shape = tensors.at(name, weight, {"U8"}).shape;
    if (shape.size() < 3 || shape.back() != kMxBlockBytes) {
      refuse_stored(name, "has the shape ", at::IntArrayRef(shape), ", expected [.., rows, blocks, ", kMxBlockBytes,
                    "]");
    }
    std::vector<int64_t> sizes(shape.begin(), shape.end() - 1);
    const std::string scales = weight + kScales;
    if (tensors.at(scales, weight, {"U8"}).shape != sizes) {
      refuse_stored(scales, "has the shape ", at::IntArrayRef(tensors.all().at(scales).shape), ", expected ",
                    at::IntArrayRef(sizes), " beside ", name);
    }
    sizes.back() *= 2 * kMxBlockBytes;
    require_form(format, weight, sizes);
    const Encoding encoding{.format = &format, .transposed = is_transposed(sizes)};
    found.emplace(weight, StoredWeight(encoding, sizes, {}, {{.tensor = name}, {.tensor = scales}}));
  }
  return found;
}

std::vector<std::pair<std::string, at::Tensor>> store_mxfp4(const std::string& name, const EncodedTensor& weight) {
  const at::Tensor &codes = weight.parts()[0], &scales = weight.parts()[1];
  std::vector<int64_t> shape = codes.sizes().vec();
  if (is_transposed(shape) != weight.encoding().transposed) {
    refuse_stored(name, "is a stack, expected its matrices transposed before they are encoded");
  }
  shape.back() /= kMxBlockBytes;
  std::vector<int64_t> of_codes = shape;
  of_codes.push_back(kMxBlockBytes);
  return {{name + kBlocks, codes.view(of_codes)}, {name + kScales, scales.view(shape)}};
}

nlohmann::ordered_json config_of_mxfp4(const Format&, c10::ScalarType, const std::vector<std::string>& kept) {
  return {{"modules_to_not_convert", kept}};
}

}  // namespace

FolderLayout mxfp4_layout() { return {"mxfp4", {"mxfp4"}, find_mxfp4, store_mxfp4, config_of_mxfp4}; }

}  // namespace roundpipe::quantise
