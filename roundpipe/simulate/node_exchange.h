#pragma once

#include <cstddef>
#include <vector>

#include <roundpipe/schedule/costs.h>

namespace roundpipe::simulate {

// Equal nodes that train one model on rows of their own. Every node has all weights and updates 1/nodes of each layer.
struct NodeRules {
  int nodes = 1;
  double network_gb_per_s = 0;  // of a node, in each direction at once; 0 = infinite
  double latency_ms = 0;        // of each collective, besides its bytes
  bool clipped = false;         // no update before the last gradient of its step, as norms and loss scales need
  bool at_once = false;         // gradients are used at once: weights travel in their order, as they share memory
};

// When the weights of a layer are new on every node, from when its gradient has landed in the memory of each. The
// nodes are alike, so a gradient lands on all of them at once.
//
// - A channel for gradients takes the layers of a step from last to first, one at a time: a header and the payload, a
//   collective each. In the payload, a node sends its gradients of the other nodes' parts and receives theirs of its
//   own: (nodes - 1) / nodes of the layer's gradient bytes, out and in. With clipping, one collective more for the
//   norm.
// - A node updates its part of one layer at a time, lowest first.
// - A channel for weights takes the layers of a step from first to last, or as the other channel if gradients are used
//   at once, one at a time: one collective, in which (nodes - 1) / nodes of the updated weights move in each direction.
// - Both channels share the network evenly while both move bytes.
// With one node, nothing moves: only the updates take time. Layers that do not train are published when they land.
class NodeExchange {
 public:
  // `expected`: [step, layer], whether a gradient will land; other layers are published from the start.
  // `update_gb_per_s`: of weights that a node's optimizer updates; 0 = at once. `paced`: pace() says how much of that
  // rate an update gets. The costs must outlive it.
  // Throws std::invalid_argument, naming the field, for rules or rates out of range.
  NodeExchange(const schedule::LayerCosts& costs, std::vector<char> expected, const NodeRules& rules,
               double update_gb_per_s, bool paced = false);

  // A gradient of the layer has landed, which is seen by the next run().
  // REQUIRES: expected, and not landed before.
  void land(std::size_t step, std::size_t layer);
  // Goes on until `now_ms`, which never descends and is at most next_ms(). Returns whether a layer was published.
  bool run(double now_ms);
  // Whether a layer is being updated, which takes time.
  bool updating() const { return updating_now_; }
  // From `now_ms` on, which never descends, updates go on at so many bytes of weights per millisecond, at most at the
  // optimizer's own rate. REQUIRES: paced; called after every run() that leaves updating().
  void pace(double now_ms, double bytes_per_ms);
  // When run() has something to do without another gradient; infinite if nothing is under way.
  double next_ms() const { return next_ms_; }

  bool published(std::size_t step, std::size_t layer) const { return published_[at(step, layer)] != 0; }
  // For how long the network has moved bytes, in each direction.
  double network_busy_ms() const { return network_busy_ms_; }

 private:
  // A sequence of collectives, one at a time.
  struct Channel {
    enum { kWaits, kLatency, kMoves } state = kWaits;
    std::vector<std::size_t> places;  // [step, layer] of each, or kNorm
    std::size_t next = 0;
    double ends_ms = 0;
    double left_bytes = 0;
  };

  std::size_t at(std::size_t step, std::size_t layer) const { return step * costs_.size() + layer; }
  const schedule::LayerCost& cost_of(std::size_t place) const { return costs_[place % costs_.size()]; }
  void list_turns();
  bool may_begin(const Channel& channel) const;
  void over(const Channel& channel);
  void exchanged(std::size_t place);
  // Each returns whether it did something.
  bool go_on(Channel& channel);
  bool begin_update();
  bool end_update();
  void updated(std::size_t place);
  void publish(std::size_t place);
  int moving() const;
  void move_bytes(double now_ms);
  void set_next();

  const schedule::LayerCosts& costs_;
  const NodeRules rules_;
  const double update_bytes_per_ms_, network_bytes_per_ms_;
  const bool paced_;
  std::vector<char> trains_;  // [step, layer], of all below: gradients are exchanged
  std::vector<char> landed_, updated_, published_;
  std::vector<std::size_t> held_;  // exchanged, until the last gradient of the step
  std::vector<std::size_t> left_;  // [step]: gradients to exchange before updates may begin
  std::vector<std::size_t> to_update_;
  std::size_t updating_ = 0;
  bool updating_now_ = false;
  double update_left_bytes_ = 0, paced_at_ms_ = 0, pace_bytes_per_ms_ = 0;  // since paced_at_ms_; if paced
  double update_ends_ms_;
  Channel gradients_, weights_;
  double now_ms_ = 0, next_ms_;
  double network_busy_ms_ = 0;
  bool any_published_ = false;
};

}  // namespace roundpipe::simulate
