#include <roundpipe/quantise/format.h>

#include <array>
#include <stdexcept>

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>

#include <roundpipe/core/error.h>
#include <roundpipe/kernels/kernels.h>
#include <roundpipe/quantise/nested_scales.h>

namespace roundpipe::quantise {

namespace {

int64_t product(at::IntArrayRef sizes) { return c10::multiply_integers(sizes); }

const std::array<Format, 10>& formats() {
  constexpr int64_t kQloraBlock = 64, kMxBlock = 32;
  static const std::array all = {
      Format({.name = "nf4", .form = "nf4", .block = kQloraBlock, .in_byte = 2, .multiple = 2}),
      Format({.name = "nf4-double", .form = "nf4", .block = kQloraBlock, .in_byte = 2, .multiple = 2, .nested = true}),
      Format({.name = "mxfp4", .form = "mxfp4", .block = kMxBlock, .in_byte = 2, .multiple = kMxBlock}),
      Format({.name = "int8", .form = "int8", .block = 0, .in_byte = 1, .multiple = 1}),
      Format({.name = "int4", .form = "int4", .block = 0, .in_byte = 2, .multiple = 8, .only_read = true}),
      Format({.name = "int4-32", .form = "int4", .block = 32, .in_byte = 2, .multiple = 32, .only_read = true}),
      Format({.name = "int4-64", .form = "int4", .block = 64, .in_byte = 2, .multiple = 64, .only_read = true}),
      Format({.name = "int4-128", .form = "int4", .block = 128, .in_byte = 2, .multiple = 128, .only_read = true}),
      Format({.name = "fp8", .form = "fp8", .block = 0, .in_byte = 1, .multiple = 1, .only_read = true}),
      Format({.name = "fp8-128", .form = "fp8", .block = 128, .in_byte = 1, .multiple = 128, .only_read = true}),
  };
  return all;
}

}  // namespace

std::string Format::reason_against(at::IntArrayRef sizes) const {
  if (sizes.empty()) return "has no dimensions, expected rows of numbers";
  if (product(sizes) == 0) return "has no numbers";
  if (sizes.back() % layout_.multiple == 0) return "";
  return concat("has rows of ", sizes.back(), " numbers, expected a multiple of ", layout_.multiple, " for ",
                layout_.name);
}

std::vector<std::string> Format::suffixes() const {
  if (layout_.nested) return {"_codes", "_scale", "_scale_scale", "_scale_offset", "_scale_map"};
  return {"_codes", "_scale"};
}

std::vector<Part> Format::parts(at::IntArrayRef sizes) const {
  std::vector<int64_t> codes = sizes.vec();
  codes.back() /= layout_.in_byte;
  std::vector<Part> found = {{"_codes", layout_.in_byte == 1 ? at::kChar : at::kByte, codes}};
  const int64_t block = block_of(sizes), blocks = (product(sizes) + block - 1) / block;
  if (layout_.nested) {
    for (Part& part : nested_parts(blocks)) found.push_back(std::move(part));
  } else {
    found.push_back({"_scale", layout_.form == "mxfp4" ? at::kByte : at::kFloat, {blocks}});
  }
  return found;
}

std::vector<int64_t> Format::sizes_of(at::IntArrayRef codes) const {
  std::vector<int64_t> sizes = codes.vec();
  sizes.back() *= layout_.in_byte;
  return sizes;
}

std::vector<at::Tensor> Format::encode(const at::Tensor& numbers) const {
  if (const std::string reason = reason_against(numbers.sizes()); !reason.empty()) {
    throw std::invalid_argument(concat("[quantise] the tensor ", reason));
  }
  if (numbers.is_meta()) {
    std::vector<at::Tensor> empty;
    for (const Part& part : parts(numbers.sizes()))
      empty.push_back(at::empty(part.sizes, numbers.options().dtype(part.dtype)));
    return empty;
  }
  const kernels::EncodedNumbers encoded = kernels::encode(numbers, layout_.form, block_of(numbers.sizes()));
  const at::Tensor& scales = encoded.scales;
  const at::Tensor finite = layout_.form == "mxfp4" ? scales.ne(255) : at::isfinite(scales);
  if (!finite.all().item<bool>()) {
    throw std::invalid_argument(
        "[quantise] the tensor has inf or NaN, expected finite numbers; look at the model that it is from");
  }
  std::vector<at::Tensor> found = {encoded.codes};
  if (layout_.nested) {
    for (at::Tensor& part : nest(scales)) found.push_back(std::move(part));
  } else {
    found.push_back(scales);
  }
  return found;
}

const Format& Format::flat_format() const { return layout_.nested ? find_format(layout_.form) : *this; }

std::pair<const Format*, std::vector<at::Tensor>> Format::flat(const std::vector<at::Tensor>& parts) const {
  const size_t expected = suffixes().size();
  if (parts.size() != expected || parts[0].dim() == 0) {
    throw std::invalid_argument(concat("[quantise] there are ", parts.size(), " parts for ", layout_.name,
                                       ", expected ", expected, ", of which the first has rows"));
  }
  if (!layout_.nested) return {this, parts};
  return {&flat_format(), {parts[0], flattened({parts.begin() + 1, parts.end()})}};
}

at::Tensor Format::decode(const std::vector<at::Tensor>& parts, c10::ScalarType dtype) const {
  const std::vector<at::Tensor> own = flat(parts).second;
  return kernels::decode({own[0], own[1]}, layout_.form, block_of(sizes_of(own[0].sizes())), dtype);
}

const Format& find_format(std::string_view name) {
  for (const Format& format : formats()) {
    if (format.name() == name) return format;
  }
  std::string known;
  for (const std::string& each : format_names()) known += (known.empty() ? "" : ", ") + each;
  throw std::invalid_argument(concat("[quantise] the format is '", name, "', expected one of ", known));
}

std::vector<std::string> format_names() {
  std::vector<std::string> names;
  for (const Format& format : formats()) {
    if (!format.is_only_read()) names.emplace_back(format.name());
  }
  return names;
}

}  // namespace roundpipe::quantise
