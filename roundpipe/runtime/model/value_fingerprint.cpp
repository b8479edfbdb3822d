#include <roundpipe/runtime/model/value_fingerprint.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <roundpipe/files/crc32c.h>

namespace roundpipe::runtime {

namespace {

constexpr int64_t kColumns = 4096;  // of the table whose rows and columns are summed

// The values as bytes, in the order of memory where they are dense: uint8 [bytes].
at::Tensor bytes_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach();
  const bool dense = values.is_non_overlapping_and_dense();
  return (dense ? values.as_strided({values.numel()}, {1}) : values.contiguous().view(-1)).view(at::kByte);
}

}  // namespace

ValueFingerprint::ValueFingerprint(const at::Tensor& tensor) : bytes_(static_cast<int64_t>(tensor.nbytes())) {
  if (bytes_ == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor bytes = bytes_of(tensor);
  if (bytes.is_cpu()) {
    checksum_ = files::crc32c(bytes.const_data_ptr(), static_cast<size_t>(bytes_));
    return;
  }
  // As words of eight bytes where they lie so. A change that no sum of a row shows would have to keep all columns, too.
  const bool aligned = bytes.storage_offset() % 8 == 0;
  const int64_t word_bytes = aligned ? 8 : 1;
  const int64_t summed_bytes = bytes_ / (kColumns * word_bytes) * (kColumns * word_bytes);
  if (summed_bytes > 0) {
    const at::Tensor part = bytes.narrow(0, 0, summed_bytes);
    const at::Tensor table = (aligned ? part.view(at::kLong) : part).view({-1, kColumns});
    for (const int64_t dimension : {0, 1}) sums_.push_back(table.sum(dimension, /*keepdim=*/false, at::kLong));
  }
  sums_.push_back(bytes.narrow(0, summed_bytes, bytes_ - summed_bytes).clone());
}

bool ValueFingerprint::same_as(const ValueFingerprint& other) const {
  return bytes_ == other.bytes_ && checksum_ == other.checksum_ &&
         std::ranges::equal(sums_, other.sums_,
                            [](const at::Tensor& a, const at::Tensor& b) { return at::equal(a, b); });
}

}  // namespace roundpipe::runtime
