#include <roundpipe/quantise/encoded_tensor.h>

#include <stdexcept>
#include <utility>

#include <ATen/core/grad_mode.h>

#include <roundpipe/core/error.h>

namespace roundpipe::quantise {

namespace {

std::vector<int64_t> exchanged(std::vector<int64_t> sizes, bool transposed) {
  if (transposed) std::swap(sizes[sizes.size() - 1], sizes[sizes.size() - 2]);
  return sizes;
}

}  // namespace

std::vector<Part> Encoding::parts(at::IntArrayRef sizes) const {
  return format->parts(exchanged(sizes.vec(), transposed));
}

Encoding Encoding::of_stack(int64_t numbers) const {
  if (transposed || !format->ends_rows(numbers)) {
    throw std::invalid_argument(
        concat("is encoded in blocks of ", format->name(), " that do not end with rows of ", numbers,
               " numbers, and is one of several in a stack, expected whole blocks; quantise the plain model again"));
  }
  Encoding made = *this;
  made.format = &format->flat_format();
  return made;
}

std::vector<int64_t> EncodedTensor::sizes() const {
  return exchanged(encoding_.format->sizes_of(parts_.at(0).sizes()), encoding_.transposed);
}

std::vector<EncodedTensor> EncodedTensor::select(const std::vector<int64_t>& indices) const {
  const auto [format, parts] = encoding_.format->flat(parts_);
  const at::Tensor &codes = parts[0], &scales = parts[1];
  const int64_t count = codes.size(0), blocks = scales.numel() / count;
  const std::vector<int64_t> one = format->sizes_of(codes.sizes().slice(1));
  if (format->parts(one)[1].sizes[0] * count != scales.numel()) {
    throw std::invalid_argument(concat("[quantise] a block of ", format->name(), " has numbers of two matrices ", one,
                                       ", expected whole blocks in each; keep this tensor as it is"));
  }
  Encoding encoding = encoding_;
  encoding.format = format;
  std::vector<EncodedTensor> found;
  for (const int64_t index : indices) {
    found.emplace_back(encoding, std::vector{codes.select(0, index), scales.narrow(0, index * blocks, blocks)});
  }
  return found;
}

at::Tensor EncodedTensor::values() const {
  const at::NoGradGuard no_grad;
  const at::Tensor values = encoding_.format->decode(parts_, encoding_.dtype);
  return encoding_.transposed ? values.transpose(-2, -1).contiguous() : values;
}

}  // namespace roundpipe::quantise
