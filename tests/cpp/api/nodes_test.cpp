#include <roundpipe/roundpipe.h>

#include <barrier>
#include <thread>

#include <doctest/doctest.h>

#include <roundpipe/cluster/block_exchange.h>

#include "../local_nodes.h"
#include "support/chain.h"

using namespace roundpipe;
using namespace roundpipe::support;

namespace {

struct NodeKind {
  std::string name;
  bool asynchronous = true;
  std::optional<double> max_grad_norm = std::nullopt;
  int without_rows = -1;  // a node that has no batch in the second step
  bool at_once = false;
};
const std::vector<NodeKind> kNodeKinds = {{"asynchronous"},
                                          {"synchronous", false},
                                          {"clipping", true, 0.5},
                                          {"clipping synchronously", false, 0.5},
                                          {"a node without rows", true, std::nullopt, 1},
                                          {"gradients at once", false, std::nullopt, 0, true}};
constexpr int kNodeSteps = 3;

torch::nn::Sequential made_net() {
  at::manual_seed(4);
  return torch::nn::Sequential(torch::nn::Linear(6, 384), torch::nn::Tanh(), torch::nn::Linear(384, 384),
                               torch::nn::Tanh(), torch::nn::Linear(384, 4));
}

uint64_t batch_number(int step, int node) { return static_cast<uint64_t>(100 * step + node); }

// The weights after all steps, on one node of several. Nodes of one process share its devices, where a job may wait for
// the weights of a step: so no call is made before all nodes' steps are over.
std::vector<Tensor> train_node(const NodeKind& kind, const std::shared_ptr<cluster::Nodes>& nodes,
                               const torch::nn::Sequential& net, std::barrier<>& all_here) {
  ModelOptions options;
  options.run.microbatches = 2;
  Model model(net, options);
  OptimizerFormat format;
  format.nodes = nodes;
  format.gradients_at_once = kind.at_once;
  Optimizer optimizer(model, PlainTraining::rule(), {}, format);
  for (int step = 0; step < kNodeSteps; ++step) {
    if (step != 1 || nodes->rank() != kind.without_rows) {
      const Sample batch = sample(batch_number(step, nodes->rank()));
      model.forward_backward(batch.inputs, batch.labels, squared_error);
    }
    model.step(optimizer, {.asynchronous = kind.asynchronous, .max_grad_norm = kind.max_grad_norm}).wait();
    all_here.arrive_and_wait();
  }
  model.synchronize();
  return copies_of(net->parameters());
}

// The same by a plain loop over all nodes' batches: gradients of each node's microbatches in order, then those of the
// nodes in order, then the mean.
std::vector<Tensor> train_plain(const NodeKind& kind, int nodes) {
  torch::nn::Sequential net = made_net();
  torch::optim::SGD sgd(net->parameters(), PlainTraining::rule());
  std::vector<Tensor> late;  // what an asynchronous call reads
  for (int step = 0; step < kNodeSteps; ++step) {
    const std::vector<Tensor> newest = copies_of(net->parameters());
    if (kind.asynchronous && !late.empty()) {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < late.size(); ++i) net->parameters()[i].copy_(late[i]);
    }
    std::vector<Tensor> sums(newest.size());
    for (int node = 0; node < nodes; ++node) {
      net->zero_grad();
      const bool has_rows = step != 1 || node != kind.without_rows;
      if (has_rows) {
        const Sample batch = sample(batch_number(step, node));
        const auto inputs = batch.inputs.tensor_split(2), labels = batch.labels.tensor_split(2);
        for (size_t m = 0; m < 2; ++m) squared_error(net->forward(inputs[m]), labels[m]).backward();
      }
      for (size_t i = 0; i < sums.size(); ++i) {
        const Tensor& gradient = net->parameters()[i].grad();
        const Tensor own = has_rows ? gradient.clone() : at::zeros_like(newest[i]);
        sums[i] = sums[i].defined() ? sums[i] + own : own;
      }
    }
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < sums.size(); ++i) {
      net->parameters()[i].copy_(newest[i]);
      net->parameters()[i].mutable_grad() = sums[i] * static_cast<float>(1.0 / nodes);
    }
    if (kind.max_grad_norm) torch::nn::utils::clip_grad_norm_(net->parameters(), *kind.max_grad_norm);
    sgd.step();
    late = newest;
  }
  return copies_of(net->parameters());
}

bool near(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!at::allclose(a[i], b[i], 1e-5, 1e-6)) return false;
  }
  return a.size() == b.size();
}

}  // namespace

TEST_SUITE("several nodes") {
  TEST_CASE("what a node holds of a parameter does not depend on what else is trained") {
    const at::Tensor large = at::empty({5, optim::kShardGrain}, at::kBFloat16), small = at::empty({7}, at::kBFloat16);
    memory::BlockLayout layout;
    for (const at::Tensor& tensor : {large, small, large}) layout.add(tensor, at::kBFloat16);
    const cluster::BlockShards all = cluster::shard_block(layout, layout, {1, 1, 1}, 3);
    const cluster::BlockShards last = cluster::shard_block(layout, layout, {0, 0, 1}, 3);
    CHECK((all.elements == last.elements));
    CHECK(all.weights.runs.size() == 1);
    REQUIRE(last.weights.runs.size() == 1);
    CHECK(last.weights.runs[0].first_parameter == 2);
    CHECK(last.weights.runs[0].bounds.front() == layout.tensors[2].offset_bytes);
  }

  TEST_CASE("nodes that share a training end with the weights of a plain loop over all their batches") {
    set_devices("virtual:2");
    for (const int count : {2, 3}) {
      for (const NodeKind& kind : kNodeKinds) {
        CAPTURE(kind.name);
        const auto nodes = made_nodes(count);
        std::vector<torch::nn::Sequential> nets;
        for (int rank = 0; rank < count; ++rank) nets.push_back(made_net());
        std::vector<std::vector<Tensor>> ends(nodes.size());
        std::barrier<> all_here(count);
        std::vector<std::thread> threads;
        for (size_t rank = 0; rank < nodes.size(); ++rank) {
          threads.emplace_back([&, rank] { ends[rank] = train_node(kind, nodes[rank], nets[rank], all_here); });
        }
        for (std::thread& thread : threads) thread.join();
        const std::vector<Tensor> expected = train_plain(kind, count);
        // Clipping sums squares in another order than libtorch.
        CHECK((kind.max_grad_norm ? near(ends[0], expected) : alike(ends[0], expected)));
        for (size_t rank = 1; rank < nodes.size(); ++rank) CHECK(same_state(ends[rank], ends[0]));
      }
    }
  }
}
