#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <roundpipe/cluster/control.h>

namespace c10d {
class ProcessGroup;
}

namespace roundpipe::cluster {

class Channel;
struct Heartbeat;

// The other processes that train the same model, each with rows and devices of its own, and two process groups that
// only this object uses: collectives of gradients and of weights run side by side, each kind on its own thread. By a
// control, they agree on what they train; several nodes of the same processes may have the same one.
//
// The first collective that fails is the last: every later one throws the same error at once. Its text names the ranks
// that give no sign of life, which each process writes into the groups' store about once a second.
// Thread safety: the collectives of a link only on its thread; the rest from any thread.
class Nodes {
 public:
  // Each process passes groups of the same ranks. `timeout`: how long another rank may take to join a collective.
  // Throws std::invalid_argument if the groups, or that of the control, differ in size or rank, or there is no control.
  Nodes(c10::intrusive_ptr<c10d::ProcessGroup> gradients, c10::intrusive_ptr<c10d::ProcessGroup> weights,
        std::shared_ptr<Control> control, std::chrono::milliseconds timeout);
  // The groups that are registered under these names, as torch.distributed.new_group does. Throws std::invalid_argument
  // if there are none.
  static std::shared_ptr<Nodes> of_names(const std::string& gradients, const std::string& weights,
                                         std::shared_ptr<Control> control, std::chrono::milliseconds timeout);
  ~Nodes();
  Nodes(const Nodes&) = delete;
  Nodes& operator=(const Nodes&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::shared_ptr<Control>& control() const { return control_; }

  enum class Link { kGradients, kWeights };
  // The thread of a link.
  Channel& channel(Link link);
  // Memory that the next collectives of a link may use: uint8, at least so long, uninitialized. The same memory each
  // time. On the link's thread.
  at::Tensor scratch(Link link, int64_t size_bytes);

  // Collectives. They block, and throw Error if one fails; `what` says in that text what was exchanged. Host tensors.
  // all: uint8 [size, n], own: uint8 [n], not part of `all`.
  void all_gather(Link link, const at::Tensor& all, const at::Tensor& own, const std::string& what);
  // uint8 [sum of splits]: to and from each rank so many bytes, ranks in order.
  void all_to_all(Link link, const at::Tensor& received, const std::vector<int64_t>& received_bytes,
                  const at::Tensor& sent, const std::vector<int64_t>& sent_bytes, const std::string& what);
  // float64, in place: the sum over all ranks, in an order that the group chooses.
  void sum(Link link, const at::Tensor& values, const std::string& what);

 private:
  template <typename Start>
  void run(Link link, const std::string& what, Start start);

  const c10::intrusive_ptr<c10d::ProcessGroup> groups_[2];
  const std::shared_ptr<Control> control_;
  const int rank_;
  const int size_;
  const std::chrono::milliseconds patience_;  // of a collective
  const std::shared_ptr<Heartbeat> heartbeat_;
  at::Tensor scratch_[2];  // each used on its link's thread
  const std::unique_ptr<Channel> channels_[2];
};

}  // namespace roundpipe::cluster
