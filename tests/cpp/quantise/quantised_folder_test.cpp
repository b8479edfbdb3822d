#include <roundpipe/quantise/quantised_folder.h>

#include <map>
#include <set>
#include <stdexcept>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

namespace roundpipe::quantise {

using at::Tensor;

namespace {

const char* dtype_of(const Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat ? "F32" : tensor.scalar_type() == at::kChar ? "I8" : "U8";
}

// The tensors of a folder.
struct Folder {
  std::map<std::string, Tensor> tensors;

  StoredWeights find(const std::string& config) const {
    std::vector<files::TensorEntry> entries;
    for (const auto& [name, tensor] : tensors) {
      entries.push_back({.name = name,
                         .dtype = dtype_of(tensor),
                         .shape = tensor.sizes().vec(),
                         .bytes = static_cast<int64_t>(tensor.nbytes())});
    }
    return find_stored_weights(config, entries, [&](const std::string& name) { return tensors.at(name); });
  }
};

std::vector<Tensor> parts_of(const StoredWeight& weight, const Folder& folder) {
  std::vector<Tensor> parts;
  for (size_t i = 0; i < weight.stored_parts().size(); ++i) {
    const std::string& name = weight.stored_parts()[i].tensor;
    parts.push_back(weight.part(i, name.empty() ? Tensor() : folder.tensors.at(name)));
  }
  return parts;
}

}  // namespace

TEST_CASE("quantised folders: what is stored is found with the same parts") {
  at::manual_seed(0);
  for (const std::string& name : format_names()) {
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{96, 128}, {4, 64, 128}}) {
      CAPTURE(name);
      CAPTURE(sizes.size());
      const bool is_transposed = name == "mxfp4" && sizes.size() > 2;
      const Encoding encoding{&find_format(name), at::kBFloat16, is_transposed};
      const Tensor numbers = at::randn(sizes).to(at::kBFloat16);
      const Tensor own = is_transposed ? numbers.transpose(-2, -1).contiguous() : numbers;
      const EncodedTensor weight(encoding, encoding.format->encode(own));
      Folder folder{{{"norm.weight", at::ones({3})}}};
      for (const auto& [tensor, value] : stored_tensors("a.weight", weight)) folder.tensors.emplace(tensor, value);
      const StoredWeights found = folder.find(stored_config(*encoding.format, at::kBFloat16, {"lm_head"}));
      REQUIRE(found.size() == 1);
      const StoredWeight& stored = found.at("a.weight");
      CHECK(stored.sizes() == sizes);
      CHECK(stored.encoding(at::kBFloat16).format == encoding.format);
      CHECK(stored.encoding(at::kBFloat16).transposed == is_transposed);
      const std::vector<Tensor> parts = parts_of(stored, folder);
      REQUIRE(parts.size() == weight.parts().size());
      for (size_t i = 0; i < parts.size(); ++i) {
        CHECK(parts[i].equal(weight.parts()[i]));
        CHECK((parts[i].sizes() == at::IntArrayRef(stored.parts()[i].sizes)));
      }
      const std::vector<std::string> names = stored.tensors();
      CHECK(std::set<std::string>(names.begin(), names.end()).size() == folder.tensors.size() - 1);
    }
  }
}

TEST_CASE("quantised folders: NF4 decodes to the dtype that it was encoded from, others to any") {
  for (const std::string& name : format_names()) {
    const Encoding encoding{&find_format(name), at::kBFloat16};
    Folder folder;
    const EncodedTensor weight(encoding, encoding.format->encode(at::ones({2, 64}, at::kBFloat16)));
    for (const auto& [tensor, value] : stored_tensors("w", weight)) folder.tensors.emplace(tensor, value);
    const StoredWeights found = folder.find(stored_config(*encoding.format, at::kBFloat16, {}));
    if (name.starts_with("nf4")) {
      CHECK_THROWS_AS(found.at("w").encoding(at::kFloat), std::invalid_argument);
    } else {
      CHECK((found.at("w").encoding(at::kFloat).dtype == at::kFloat));
    }
  }
}

TEST_CASE("quantised folders: codes of several tensors are stacked where blocks end with rows") {
  const Encoding nested{&find_format("nf4-double")};
  CHECK(nested.of_stack(128).format == &find_format("nf4"));
  CHECK_THROWS_AS(nested.of_stack(96), std::invalid_argument);
  CHECK(Encoding{&find_format("int8")}.of_stack(13).format == &find_format("int8"));
  CHECK_THROWS_AS((Encoding{&find_format("mxfp4"), at::kBFloat16, true}.of_stack(64)), std::invalid_argument);
}

TEST_CASE("quantised folders: other methods and configs without weights are refused") {
  const Folder folder{{{"a.weight", at::ones({2, 64})}}};
  for (const char* config : {"", "[]", "{}", R"({"quant_method": "awq"})", R"({"quant_method": 4})",
                             R"({"quant_method": "mxfp4"})", R"({"quant_method": "compressed-tensors"})"}) {
    CAPTURE(config);
    CHECK_THROWS(folder.find(config));
  }
  CHECK_THROWS_AS(stored_config(find_format("int4-32"), at::kBFloat16, {}), std::invalid_argument);
}

}  // namespace roundpipe::quantise
