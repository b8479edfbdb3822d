#include <roundpipe/runs/model_names.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>

#include <roundpipe/core/error.h>
#include <roundpipe/memory/mapped_file.h>

namespace roundpipe {

namespace {

// In checksums, which have had some names of their own from the start.
std::string dtype_text(const at::Tensor& tensor) {
  std::string name(c10::toString(tensor.scalar_type()));
  if (name == "BFloat16") return "bfloat16";
  if (name == "Half") return "float16";
  if (name == "Float") return "float32";
  if (name == "Double") return "float64";
  std::ranges::transform(name, name.begin(), [](char c) { return static_cast<char>(std::tolower(c)); });
  return name;
}

// The CRC-32 of zlib.
uint32_t crc32(const void* data, size_t size, uint32_t crc) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t i = 0; i < made.size(); ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = (value & 1U) != 0 ? 0xEDB88320U ^ value >> 1 : value >> 1;
      made[i] = value;
    }
    return made;
  }();
  crc = ~crc;
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; ++i) crc = table[(crc ^ bytes[i]) & 255U] ^ crc >> 8;
  return ~crc;
}

}  // namespace

std::string tuple_text(at::IntArrayRef sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += concat(i == 0 ? "" : ", ", sizes[i]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

std::string sampled_checksum(const at::Tensor& tensor) {
  constexpr int64_t kSample_bytes = 4096;
  const at::Tensor flat = tensor.detach().reshape(-1);
  const int64_t size = flat.numel();
  const int64_t count = std::max<int64_t>(kSample_bytes / static_cast<int64_t>(tensor.element_size()), 1);
  const std::string head = concat(tuple_text(tensor.sizes()), " torch.", dtype_text(tensor));
  uint32_t crc = crc32(head.data(), head.size(), 0);
  const int64_t middle = std::max<int64_t>((size - count) / 2, 0);
  for (const int64_t begin : {int64_t{0}, middle, std::max<int64_t>(size - count, 0)}) {
    const at::Tensor part = flat.slice(0, begin, begin + count).contiguous();
    crc = crc32(part.const_data_ptr(), part.nbytes(), crc);
  }
  std::array<char, 9> text{};
  std::snprintf(text.data(), text.size(), "%08x", crc);
  return text.data();
}

ModelNames::ModelNames(const NamedParameters& named, const NamedParameters& named_buffers, const LeavesOut& leaves_out,
                       const std::optional<NamesInFile>& adapter)
    : is_adapter(adapter.has_value()) {
  std::unordered_map<const c10::TensorImpl*, std::string> first;
  for (const auto& [name, parameter] : named) {
    const auto [found, is_new] = first.emplace(parameter.unsafeGetTensorImpl(), name);
    if (!is_new) {
      tied.emplace_back(name, found->second);
      continue;
    }
    numbers_[parameter.unsafeGetTensorImpl()] = parameters.size();
    parameters.emplace_back(name, parameter);
    if (parameter.requires_grad()) continue;
    if (is_adapter || memory::is_mapped(parameter) || (leaves_out && leaves_out(name, parameter))) outside.insert(name);
  }
  for (const auto& [name, buffer] : named_buffers) {
    if (first.emplace(buffer.unsafeGetTensorImpl(), name).second) buffers.emplace_back(name, buffer);
  }
  if (!is_adapter) return;
  for (const auto& [name, there] : *adapter) {
    if (!outside.contains(name)) in_file[name] = there;
  }
  for (const auto& [name, buffer] : buffers) {
    if (!in_file.contains(name)) outside.insert(name);
  }
}

const std::string* ModelNames::find(const at::Tensor& parameter) const {
  const auto found = numbers_.find(parameter.unsafeGetTensorImpl());
  return found == numbers_.end() ? nullptr : &parameters[found->second].first;
}

const std::string& ModelNames::file_name(const std::string& name) const {
  const auto found = in_file.find(name);
  return found == in_file.end() ? name : found->second;
}

}  // namespace roundpipe
