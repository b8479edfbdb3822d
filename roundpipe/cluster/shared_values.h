#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/cluster/agreement.h>

namespace roundpipe::cluster {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Which tensors have the same values on all ranks already, and makes others have those of rank 0. Tensors on the host
// that live as long as the model, alike on all ranks but for their values. Thread safety: that of the agreement.
class SharedValues {
 public:
  explicit SharedValues(std::shared_ptr<Agreement> agreement) : agreement_(std::move(agreement)) {}

  // Gives every rank the values of rank 0: compares checksums first, and sends only what differs, one tensor after the
  // other, over `group`, which nothing else uses meanwhile. Collective; nothing may be computing with the tensors.
  // `kind`: see Agreement::gather. Throws std::invalid_argument if one that differs lies in a file that is mapped, and
  // Error if another rank does not answer.
  void share(const std::string& kind, const NamedTensors& named, c10d::ProcessGroup& group);

  // The checksum of each tensor, as a line for the ranks to compare.
  static Told checksums(const char* what, const NamedTensors& named);
  // The tensors that were written to since the ranks had the same values, each under one name.
  NamedTensors written(const NamedTensors& named) const;
  // All ranks have the same values in them now.
  void note_alike(const NamedTensors& named);

 private:
  bool is_new(const at::Tensor& tensor) const;

  const std::shared_ptr<Agreement> agreement_;
  std::unordered_map<const c10::TensorImpl*, uint32_t> versions_;  // of the tensors that were alike
};

}  // namespace roundpipe::cluster
