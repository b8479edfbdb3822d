#include <roundpipe/cluster/nodes.h>

#include <algorithm>
#include <stdexcept>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <roundpipe/cluster/channel.h>
#include <roundpipe/cluster/heartbeat.h>
#include <roundpipe/cluster/process_groups.h>
#include <roundpipe/core/error.h>

namespace roundpipe::cluster {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

namespace {

// Under the name that this torch has for it.
template <typename Group>
auto start_all_to_all(Group& group, at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_bytes,
                      std::vector<int64_t>& from_bytes, const c10d::AllToAllOptions& options) {
  if constexpr (requires { group.all_to_all_single(to, from, to_bytes, from_bytes, options); }) {
    return group.all_to_all_single(to, from, to_bytes, from_bytes, options);
  } else {
    return group.alltoall_base(to, from, to_bytes, from_bytes, options);
  }
}

}  // namespace

Nodes::Nodes(Group gradients, Group weights, std::shared_ptr<Control> control, std::chrono::milliseconds timeout)
    : groups_{std::move(gradients), std::move(weights)},
      control_(std::move(control)),
      rank_(groups_[0]->getRank()),
      size_(groups_[0]->getSize()),
      patience_(timeout * 3 / 4),  // so that there is time to find out who is missing
      heartbeat_(std::make_shared<Heartbeat>(groups_[0]->getStore(), rank_, size_, timeout)),
      channels_{std::make_unique<Channel>(), std::make_unique<Channel>()} {
  if (!control_) {
    throw std::invalid_argument(
        "[cluster] there is no control, expected one over a group of the same processes; make it with Control(group, "
        "timeout)");
  }
  if (groups_[1]->getRank() != rank_ || groups_[1]->getSize() != size_ || control_->rank() != rank_ ||
      control_->size() != size_) {
    throw std::invalid_argument(
        "[cluster] the groups of gradients, of weights and of the control have different ranks, expected groups of the "
        "same processes; make all with new_group");
  }
}

std::shared_ptr<Nodes> Nodes::of_names(const std::string& gradients, const std::string& weights,
                                       std::shared_ptr<Control> control, std::chrono::milliseconds timeout) {
  return std::make_shared<Nodes>(process_group(gradients), process_group(weights), std::move(control), timeout);
}

Nodes::~Nodes() = default;

Channel& Nodes::channel(Link link) { return *channels_[static_cast<size_t>(link)]; }

at::Tensor Nodes::scratch(Link link, int64_t size_bytes) {
  at::Tensor& memory = scratch_[static_cast<size_t>(link)];
  if (!memory.defined() || memory.numel() < size_bytes) {
    memory = at::Tensor();  // the old one goes before the new one comes
    memory = at::empty({size_bytes}, at::kByte);
  }
  return memory;
}

template <typename Start>
void Nodes::run(Link link, const std::string& what, Start start) {
  heartbeat_->throw_failure();
  const at::NoGradGuard no_grad;
  try {
    start(*groups_[static_cast<size_t>(link)])->wait();
  } catch (const std::exception& error) {
    heartbeat_->fail(what, error.what());
  }
  heartbeat_->throw_failure();
}

void Nodes::all_gather(Link link, const at::Tensor& all, const at::Tensor& own, const std::string& what) {
  run(link, what, [&](c10d::ProcessGroup& group) {
    std::vector<std::vector<at::Tensor>> outputs{all.unbind()};
    std::vector<at::Tensor> inputs{own};
    c10d::AllgatherOptions options;
    options.timeout = patience_;
    return group.allgather(outputs, inputs, options);
  });
}

void Nodes::all_to_all(Link link, const at::Tensor& received, const std::vector<int64_t>& received_bytes,
                       const at::Tensor& sent, const std::vector<int64_t>& sent_bytes, const std::string& what) {
  run(link, what, [&](c10d::ProcessGroup& group) {
    at::Tensor to = received;
    at::Tensor from = sent;
    std::vector<int64_t> to_bytes = received_bytes;
    std::vector<int64_t> from_bytes = sent_bytes;
    c10d::AllToAllOptions options;
    options.timeout = patience_;
    return start_all_to_all(group, to, from, to_bytes, from_bytes, options);
  });
}

void Nodes::sum(Link link, const at::Tensor& values, const std::string& what) {
  run(link, what, [&](c10d::ProcessGroup& group) {
    std::vector<at::Tensor> tensors{values};
    c10d::AllreduceOptions options;
    options.timeout = patience_;
    return group.allreduce(tensors, options);
  });
}

}  // namespace roundpipe::cluster
