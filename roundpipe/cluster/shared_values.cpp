#include <roundpipe/cluster/shared_values.h>

#include <algorithm>
#include <iomanip>
#include <set>
#include <stdexcept>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <roundpipe/cluster/message.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/files/crc32c.h>
#include <roundpipe/memory/mapped_file.h>

namespace roundpipe::cluster {

namespace {

constexpr int64_t kPieceBytes = int64_t{16} << 20;

// One name of each tensor, in the order of the first ones.
NamedTensors each_once(const NamedTensors& named) {
  std::unordered_map<const c10::TensorImpl*, size_t> known;
  NamedTensors found;
  for (const auto& [name, tensor] : named) {
    const auto [place, is_first] = known.try_emplace(tensor.unsafeGetTensorImpl(), found.size());
    if (is_first)
      found.emplace_back(name, tensor);
    else
      found[place->second].first = name;
  }
  return found;
}

at::Tensor contiguous(const at::Tensor& tensor) { return tensor.detach().resolve_conj().resolve_neg().contiguous(); }

uint32_t checksum(const at::Tensor& tensor) {
  const at::Tensor content = contiguous(tensor);
  return content.numel() == 0 ? 0 : files::crc32c(content.const_data_ptr(), content.nbytes());
}

// Of a tensor as `contiguous` returns it: views of its bytes.
std::vector<at::Tensor> pieces(const at::Tensor& content) {
  if (content.numel() == 0) return {};
  return content.view(-1).view(at::kByte).split(kPieceBytes);
}

void send(const std::string& name, const at::Tensor& tensor, c10d::ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  const at::Tensor content = contiguous(tensor);
  try {
    for (const at::Tensor& piece : pieces(content)) {
      std::vector<at::Tensor> tensors{piece};
      group.broadcast(tensors)->wait();
    }
  } catch (const std::exception& error) {
    throw Error(concat("[distributed] the values of ", name, " of rank 0 did not arrive (", frontend().said(error),
                       "); look at the other ranks' output, and start all nodes again"));
  }
  if (content.const_data_ptr() != tensor.const_data_ptr()) tensor.detach().copy_(content);
  tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

bool SharedValues::is_new(const at::Tensor& tensor) const {
  const auto found = versions_.find(tensor.unsafeGetTensorImpl());
  return found == versions_.end() || found->second != tensor._version();
}

void SharedValues::share(const std::string& kind, const NamedTensors& named, c10d::ProcessGroup& group) {
  const NamedTensors tensors = each_once(named);
  Message changed;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (is_new(tensors[i].second)) changed.add(static_cast<uint64_t>(i));
  }
  std::set<size_t> anywhere;
  for (const Agreement::Answer& answer : agreement_->gather(kind, changed.bytes())) {
    for (MessageReader reader(answer.told); !reader.is_at_end();) anywhere.insert(reader.number<uint64_t>());
  }
  if (anywhere.empty()) return;
  struct State {
    uint32_t checksum = 0;
    bool is_mapped = false;
  };
  Message own;
  for (const size_t i : anywhere) {
    const at::Tensor& tensor = tensors.at(i).second;
    own.add(checksum(tensor)).add(static_cast<uint8_t>(memory::is_mapped(tensor)));
  }
  std::vector<std::vector<State>> states;  // by rank
  for (const Agreement::Answer& answer : agreement_->gather(kind, own.bytes())) {
    std::vector<State>& of_rank = states.emplace_back();
    MessageReader reader(answer.told);
    while (of_rank.size() < anywhere.size()) {
      const auto found = reader.number<uint32_t>();
      of_rank.push_back({found, reader.number<uint8_t>() != 0});
    }
  }
  size_t place = 0;
  for (const size_t i : anywhere) {
    const auto& [name, tensor] = tensors[i];
    bool differs = false, is_mapped = false;
    for (const std::vector<State>& of_rank : states) {
      differs |= of_rank[place].checksum != states[0][place].checksum;
      is_mapped |= of_rank[place].is_mapped;
    }
    ++place;
    if (!differs) continue;
    if (is_mapped) {
      throw std::invalid_argument(
          concat("[distributed] the ranks differ in the values of ", name,
                 ", which lies in a mapped file (frozen_weights='mmap') and cannot be changed; expected the same files "
                 "on every rank; copy them, or leave frozen_weights out"));
    }
    send(name, tensor, group);
  }
  versions_.clear();
  note_alike(tensors);
}

Told SharedValues::checksums(const char* what, const NamedTensors& named) {
  Told told;
  for (const auto& [name, tensor] : each_once(named)) {
    told.emplace_back(concat(what, name), concat(std::hex, std::setw(8), std::setfill('0'), checksum(tensor)));
  }
  return told;
}

NamedTensors SharedValues::written(const NamedTensors& named) const {
  NamedTensors found;
  for (const auto& [name, tensor] : each_once(named)) {
    if (is_new(tensor)) found.emplace_back(name, tensor);
  }
  return found;
}

void SharedValues::note_alike(const NamedTensors& named) {
  for (const auto& [name, tensor] : named)
    versions_[tensor.unsafeGetTensorImpl()] = static_cast<uint32_t>(tensor._version());
}

}  // namespace roundpipe::cluster
