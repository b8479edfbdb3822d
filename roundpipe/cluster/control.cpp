#include <roundpipe/cluster/control.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <thread>

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <roundpipe/cluster/differences.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/device/event.h>

namespace roundpipe::cluster {

namespace {

constexpr size_t kFrameBytes = 512;
constexpr size_t kFirstBytes = kFrameBytes - sizeof(uint32_t);  // of a message, behind its length

// One message from each rank to each. Outlives a wait that was interrupted.
struct Transfer {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::chrono::milliseconds timeout;
  int rank = 0;
  at::Tensor sent;
  std::vector<at::Tensor> received;   // by rank
  std::map<int, std::string> failed;  // why, by rank

  void run() {
    std::vector<std::pair<int, c10::intrusive_ptr<c10d::Work>>> works;
    const auto attempt = [&](int other, const auto& work) {
      try {
        work();
      } catch (const std::exception& error) {
        failed.try_emplace(other, frontend().said(error));
      }
    };
    for (int other = 0; other < static_cast<int>(received.size()); ++other) {
      if (other == rank) continue;
      attempt(other, [&] {  // fails at once if the connection is known to be broken
        std::vector<at::Tensor> to{received[static_cast<size_t>(other)]}, from{sent};
        if (to[0].numel() > 0) works.emplace_back(other, group->recv(to, other, 0));
        if (sent.numel() > 0) works.emplace_back(other, group->send(from, other, 0));
      });
    }
    for (const auto& [other, work] : works) attempt(other, [&work = work, this] { work->wait(timeout); });
  }
};

}  // namespace

Control::Control(c10::intrusive_ptr<c10d::ProcessGroup> group, std::chrono::milliseconds timeout)
    : group_(std::move(group)), timeout_(timeout), rank_(group_->getRank()), size_(group_->getSize()) {}

Control::~Control() = default;

std::string Control::name() const { return group_->getGroupName(); }

std::vector<std::string> Control::exchange(const std::string& message) {
  if (!closed_.empty()) throw Error(closed_);
  closed_ =
      "[distributed] an exchange between the nodes was interrupted, so they can no longer agree; start all of them "
      "again from the last checkpoint";
  const auto length = static_cast<uint32_t>(message.size());
  std::string frame(kFrameBytes, '\0');
  std::memcpy(frame.data(), &length, sizeof(length));
  std::memcpy(frame.data() + sizeof(length), message.data(), std::min<size_t>(length, kFirstBytes));
  std::vector<std::string> messages = send_all(frame, std::vector<size_t>(static_cast<size_t>(size_), kFrameBytes));
  std::vector<size_t> tail_bytes;
  for (std::string& each : messages) {
    uint32_t bytes = 0;
    std::memcpy(&bytes, each.data(), sizeof(bytes));
    tail_bytes.push_back(bytes - std::min<size_t>(bytes, kFirstBytes));
    each = each.substr(sizeof(bytes), std::min<size_t>(bytes, kFirstBytes));
  }
  if (std::ranges::any_of(tail_bytes, [](size_t bytes) { return bytes > 0; })) {
    const std::vector<std::string> tails = send_all(message.substr(std::min<size_t>(length, kFirstBytes)), tail_bytes);
    for (size_t rank = 0; rank < tails.size(); ++rank) messages[rank] += tails[rank];
  }
  closed_.clear();
  return messages;
}

// Sends `mine` to every other rank, and returns what they have sent, given how much that is.
std::vector<std::string> Control::send_all(const std::string& mine, const std::vector<size_t>& sizes) {
  require_no_locks("an exchange between the nodes");
  const auto transfer = std::make_shared<Transfer>();
  transfer->group = group_;
  transfer->timeout = timeout_;
  transfer->rank = rank_;
  transfer->sent = at::empty({static_cast<int64_t>(mine.size())}, at::kByte);
  std::memcpy(transfer->sent.data_ptr(), mine.data(), mine.size());
  for (const size_t bytes : sizes) transfer->received.push_back(at::empty({static_cast<int64_t>(bytes)}, at::kByte));

  // On a thread of its own, because gloo's waits do not end at an interrupt.
  const device::EventPtr done = device::make_event();
  std::thread([transfer, done] {
    become_engine_thread();
    device::run_callback(
        [&] {
          transfer->run();
          done->fire();
        },
        [&](const std::exception_ptr& error) { done->fail(error); });
  }).detach();
  device::wait_interruptible(*done);

  if (!transfer->failed.empty()) {
    std::vector<int> silent;
    for (const auto& [rank, reason] : transfer->failed) silent.push_back(rank);
    closed_ =
        concat("[distributed] ", ranks_in_words(silent), " did not answer rank ", rank_, " within ",
               std::chrono::duration<double>(timeout_).count(), " s, or has ended (", transfer->failed.begin()->second,
               "); look at its own output, and start all nodes again from the last checkpoint");
    throw Error(closed_);
  }
  std::vector<std::string> all;
  for (const at::Tensor& each : transfer->received)
    all.emplace_back(static_cast<const char*>(each.const_data_ptr()), static_cast<size_t>(each.numel()));
  all[static_cast<size_t>(rank_)] = mine;
  return all;
}

}  // namespace roundpipe::cluster
