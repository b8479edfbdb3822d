#pragma once

#include <barrier>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace roundpipe::support {

// The ranks of a group that are threads of one process: a collective is over when all have come, and a message when it
// has been taken.
struct Meeting {
  explicit Meeting(int ranks) : size(ranks), posted(static_cast<size_t>(ranks)), all_here(ranks) {}
  const int size;
  struct Post {
    at::Tensor tensor;
    std::vector<int64_t> splits;
  };
  std::vector<Post> posted;  // by each rank, before the barrier; read by all after it
  std::barrier<> all_here;

  void post(int from, int to, const at::Tensor& message) {
    const std::lock_guard lock(mutex);
    mail[{from, to}].push_back(message.clone());
    arrived.notify_all();
  }
  // Throws if the rank has left and there is none.
  at::Tensor take(int from, int to) {
    std::unique_lock lock(mutex);
    std::deque<at::Tensor>& waiting = mail[{from, to}];
    arrived.wait(lock, [&] { return !waiting.empty() || left[from]; });
    if (waiting.empty()) throw std::runtime_error("connection closed by peer\nmore");
    at::Tensor message = std::move(waiting.front());
    waiting.pop_front();
    return message;
  }
  // A rank ends without another message.
  void leave(int rank) {
    const std::lock_guard lock(mutex);
    left[rank] = true;
    arrived.notify_all();
  }
  std::mutex mutex;
  std::condition_variable arrived;
  // Protected by mutex.
  std::map<std::pair<int, int>, std::deque<at::Tensor>> mail;  // by who sends and who receives
  std::map<int, bool> left;
};

struct OverWork : c10d::Work {
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

// A message that is there when it is waited for.
struct Receipt : OverWork {
  Receipt(std::shared_ptr<Meeting> from_meeting, int from_rank, int to_rank, at::Tensor into)
      : meeting(std::move(from_meeting)), from(from_rank), to(to_rank), tensor(std::move(into)) {}
  bool wait(std::chrono::milliseconds) override {
    tensor.copy_(meeting->take(from, to));
    return true;
  }
  const std::shared_ptr<Meeting> meeting;
  const int from, to;
  const at::Tensor tensor;
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
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int) override {
    meeting_->post(rank_, to, tensors[0]);
    return c10::make_intrusive<OverWork>();
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int) override {
    return c10::make_intrusive<Receipt>(meeting_, from, rank_, tensors[0]);
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

// Runs `work` of each rank on a thread of its own, and returns what it has returned.
template <typename Work>
auto on_ranks(int count, const Work& work) {
  std::vector<decltype(work(0))> results(static_cast<size_t>(count));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank)
    threads.emplace_back([&, rank] { results[static_cast<size_t>(rank)] = work(rank); });
  for (std::thread& thread : threads) thread.join();
  return results;
}

}  // namespace roundpipe::support
