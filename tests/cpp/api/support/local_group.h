#pragma once

#include <barrier>
#include <cstring>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace roundpipe::support {

// The ranks of a group that are threads of one process: a collective is over when all have come.
struct Meeting {
  explicit Meeting(int ranks) : size(ranks), posted(static_cast<size_t>(ranks)), all_here(ranks) {}
  const int size;
  struct Post {
    at::Tensor tensor;
    std::vector<int64_t> splits;
  };
  std::vector<Post> posted;  // by each rank, before the barrier; read by all after it
  std::barrier<> all_here;
};

struct OverWork : c10d::Work {
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

// A rank of such a group.
class LocalGroup : public c10d::ProcessGroup {
 public:
  LocalGroup(std::shared_ptr<Meeting> meeting, int rank)
      : ProcessGroup(rank, meeting->size), meeting_(std::move(meeting)), rank_(rank) {}
  int getRank() const override { return rank_; }
  int getSize() const override { return meeting_->size; }

  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions&) override {
    meet({inputs[0], {}}, [&](int from, const Meeting::Post& post) { outputs[0][from].copy_(post.tensor); });
    return c10::make_intrusive<OverWork>();
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) override {
    at::Tensor sum = at::zeros_like(tensors[0]);
    meet({tensors[0], {}}, [&](int, const Meeting::Post& post) { sum += post.tensor; });
    tensors[0].copy_(sum);
    return c10::make_intrusive<OverWork>();
  }
  // Under both names that versions of torch have.
  c10::intrusive_ptr<c10d::Work> all_to_all_single(at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_bytes,
                                                   std::vector<int64_t>& from_bytes, const c10d::AllToAllOptions&) {
    int64_t at = 0;
    meet({from, from_bytes}, [&](int rank, const Meeting::Post& post) {
      int64_t begin = 0;
      for (int before = 0; before < rank_; ++before) begin += post.splits[static_cast<size_t>(before)];
      const int64_t length = post.splits[static_cast<size_t>(rank_)];
      if (length != to_bytes[static_cast<size_t>(rank)]) throw std::logic_error("the splits do not match");
      to.narrow(0, at, length).copy_(post.tensor.narrow(0, begin, length));
      at += length;
    });
    return c10::make_intrusive<OverWork>();
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_bytes,
                                               std::vector<int64_t>& from_bytes, const c10d::AllToAllOptions& options) {
    return all_to_all_single(to, from, to_bytes, from_bytes, options);
  }

 private:
  template <typename Visit>
  void meet(Meeting::Post post, Visit visit) {
    meeting_->posted[static_cast<size_t>(rank_)] = std::move(post);
    meeting_->all_here.arrive_and_wait();
    for (int rank = 0; rank < meeting_->size; ++rank) visit(rank, meeting_->posted[static_cast<size_t>(rank)]);
    meeting_->all_here.arrive_and_wait();
  }

  const std::shared_ptr<Meeting> meeting_;
  const int rank_;
};

}  // namespace roundpipe::support
