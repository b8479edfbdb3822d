// Nodes that do not fit together are refused with the same words on each, and stay as they were.

#include <roundpipe/roundpipe.h>

#include <barrier>
#include <functional>
#include <optional>

#include <doctest/doctest.h>

#include "../local_nodes.h"
#include "support/chain.h"

using namespace roundpipe;
using namespace roundpipe::support;

namespace {

// A node's training, up to its first step.
struct NodeProgram {
  torch::nn::Linear first{4, 4}, second{4, 4};
  std::vector<torch::nn::Linear> more;
  torch::optim::SGDOptions rule{0.1};
  std::vector<ParameterGroup> groups;
  OptimizerFormat format;
  StepOptions step;
  std::function<void(Model&, Optimizer&)> before_step = [](Model&, Optimizer&) {};

  NodeProgram() {
    const at::NoGradGuard no_grad;
    for (const Tensor& parameter : second->parameters()) parameter.fill_(0.5);
    for (const Tensor& parameter : first->parameters()) parameter.fill_(0.25);
  }
};

struct NodeOutcome {
  std::string optimizer_error, step_error;
  bool unchanged = false;  // by what was refused
};

const std::string kNothing = "none";

template <typename Work>
std::string thrown_by(const Work& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return kNothing;
}

NodeOutcome run_node(NodeProgram program, const std::shared_ptr<cluster::Nodes>& nodes, std::barrier<>& all_here) {
  torch::nn::Sequential net(program.first, program.second);
  for (const torch::nn::Linear& layer : program.more) net->push_back(layer);
  Model model(net);
  program.format.nodes = nodes;
  const std::vector<Tensor> before = copies_of(net->parameters());
  const Tensor inputs = at::ones({2, 4}, program.first->weight.scalar_type());
  std::optional<Optimizer> optimizer;
  NodeOutcome outcome{kNothing, kNothing};
  outcome.optimizer_error = thrown_by([&] { optimizer.emplace(model, program.rule, program.groups, program.format); });
  if (!optimizer) {
    // A plain training by this process alone goes on.
    outcome.unchanged = same_state(copies_of(net->parameters()), before);
    model.forward_backward(inputs, std::tuple<>(), [](const Tensor& out) { return out.sum(); });
    Optimizer alone(model, torch::optim::SGDOptions(0.0));
    model.step(alone, {.asynchronous = false});
    model.synchronize();
    outcome.unchanged &= same_state(copies_of(net->parameters()), before);
    return outcome;
  }
  outcome.step_error = thrown_by([&] {
    model.forward_backward(inputs, std::tuple<>(), [](const Tensor& out) { return out.sum(); });
    program.before_step(model, *optimizer);
    model.step(*optimizer, program.step).wait();
  });
  all_here.arrive_and_wait();  // nodes of one process share its devices
  return outcome;
}

// Rank 1 differs from the others.
std::vector<NodeOutcome> run_nodes(
    int count, const std::function<void(NodeProgram&)>& change,
    const std::function<void(NodeProgram&)>& change_all = [](NodeProgram&) {}) {
  set_devices("virtual:1");
  const auto nodes = made_nodes(count);
  std::vector<NodeProgram> programs(static_cast<size_t>(count));
  for (NodeProgram& program : programs) change_all(program);
  change(programs[1]);
  std::barrier<> all_here(count);
  return on_ranks(count, [&](int rank) {
    const auto place = static_cast<size_t>(rank);
    return run_node(programs[place], nodes[place], all_here);
  });
}

const std::string kDifferIn = "[distributed] the ranks differ in model 1 (Sequential): ";
const std::string kSameOptimizer = "; expected the same parameters and optimizer on every rank";
const std::string kSameStep = "; expected the same step on every rank";

struct NodeDifference {
  std::string name;
  std::function<void(NodeProgram&)> change;
  std::string message;
};

const std::vector<NodeDifference>& optimizer_differences() {
  static const std::vector<NodeDifference> all{
      {"layers", [](NodeProgram& program) { program.more.emplace_back(4, 4); },
       "the number of layers: ranks 0 and 2 have 2, rank 1 has 3; the parameters of group 0: "},
      {"shapes", [](NodeProgram& program) { program.second = torch::nn::Linear(4, 5); },
       "1.weight: ranks 0 and 2 have 4x4 float32, rank 1 has 5x4 float32; 1.bias: ranks 0 and 2 have 4 float32, rank 1 "
       "has 5 float32"},
      {"dtypes",
       [](NodeProgram& program) {
         for (const torch::nn::Linear& layer : {program.first, program.second}) layer.ptr()->to(at::kBFloat16);
       },
       "0.weight: ranks 0 and 2 have 4x4 float32, rank 1 has 4x4 bfloat16; 0.bias: ranks 0 and 2 have 4 float32, rank "
       "1 has 4 bfloat16; "},
      {"frozen", [](NodeProgram& program) { program.second->weight.set_requires_grad(false); },
       "1.weight: ranks 0 and 2 have 4x4 float32, rank 1 has 4x4 float32, frozen; "},
      {"tied", [](NodeProgram& program) { program.second->weight = program.first->weight; },
       "1.weight: ranks 0 and 2 have 4x4 float32, rank 1 has the values of 0.weight"},
      {"weights",
       [](NodeProgram& program) {
         const at::NoGradGuard no_grad;
         program.second->bias[0] = 7;
       },
       "the values of 1.bias: ranks 0 and 2 have "},
      {"lr", [](NodeProgram& program) { program.rule = torch::optim::SGDOptions(0.2); },
       "lr of group 0: ranks 0 and 2 have 0.1, rank 1 has 0.2"},
      {"groups",
       [](NodeProgram& program) {
         program.groups = {{.holds = [](const std::string& name, const Tensor&) { return name.ends_with("bias"); }}};
       },
       "the parameters of group 0: ranks 0 and 2 have 4 (0.weight, 0.bias, 1.weight, 1.bias), rank 1 has 2 (0.bias, "
       "1.bias); "},
      {"gradients", [](NodeProgram& program) { program.format.gradients_in_fp32 = true; },
       "gradients_in_fp32: ranks 0 and 2 have false, rank 1 has true"},
      {"gradients at once", [](NodeProgram& program) { program.format.gradients_at_once = true; },
       "gradients_at_once: ranks 0 and 2 have false, rank 1 has true"},
  };
  return all;
}

const std::vector<NodeDifference>& step_differences() {
  static const std::vector<NodeDifference> all{
      {"asynchronous", [](NodeProgram& program) { program.step.asynchronous = false; },
       "asynchronous: rank 0 has true, rank 1 has false"},
      {"max_grad_norm", [](NodeProgram& program) { program.step.max_grad_norm = 0.5; },
       "max_grad_norm: rank 0 has none, rank 1 has 0.5"},
      {"clip_by",
       [](NodeProgram& program) {
         program.step.max_grad_norm = 0.5;
         program.step.clip_by = ClipBy::kLastNorm;
       },
       "max_grad_norm: rank 0 has none, rank 1 has 0.5; clip_by: rank 0 has norm, rank 1 has last_norm"},
      {"gradient_factor", [](NodeProgram& program) { program.step.gradient_factor = 1.0; },
       "gradient_factor: rank 0 has none, rank 1 has 1"},
      {"late lr",
       [](NodeProgram& program) {
         program.before_step = [](Model&, Optimizer& optimizer) { optimizer.options().lr = 3; };
       },
       "lr of group 0: rank 0 has 0.1, rank 1 has 3"},
      {"frozen late",
       [](NodeProgram& program) {
         program.before_step = [second = program.second](Model&, Optimizer&) {
           Tensor(second->weight).set_requires_grad(false);
         };
       },
       "frozen since the optimizer was made: rank 0 has none, rank 1 has 1.weight"},
      {"written late",
       [](NodeProgram& program) {
         program.before_step = [second = program.second](Model& model, Optimizer&) {
           model.synchronize();
           const at::NoGradGuard no_grad;
           Tensor(second->bias).fill_(3);
         };
       },
       "what was written to 1.bias: rank 0 has none, rank 1 has "},
  };
  return all;
}

}  // namespace

TEST_SUITE("nodes agree") {
  TEST_CASE("on the same training") {
    for (const NodeOutcome& outcome : run_nodes(2, [](NodeProgram&) {})) {
      CHECK(outcome.optimizer_error == kNothing);
      CHECK(outcome.step_error == kNothing);
    }
  }

  TEST_CASE("or an optimizer is refused on each of them, and nothing has been changed") {
    for (const NodeDifference& difference : optimizer_differences()) {
      CAPTURE(difference.name);
      const std::vector<NodeOutcome> outcomes = run_nodes(3, difference.change);
      for (const NodeOutcome& outcome : outcomes) {
        CHECK(outcome.optimizer_error == outcomes[0].optimizer_error);
        CHECK(outcome.unchanged);
      }
      CHECK(outcomes[0].optimizer_error.starts_with(kDifferIn + difference.message));
      CHECK(outcomes[0].optimizer_error.ends_with(kSameOptimizer));
    }
  }

  TEST_CASE("or a step is refused on each of them") {
    for (const NodeDifference& difference : step_differences()) {
      CAPTURE(difference.name);
      const std::vector<NodeOutcome> outcomes = run_nodes(2, difference.change);
      for (const NodeOutcome& outcome : outcomes) CHECK(outcome.step_error == outcomes[0].step_error);
      CHECK(outcomes[0].step_error.starts_with(kDifferIn + difference.message));
      CHECK(outcomes[0].step_error.ends_with(kSameStep));
    }
  }

  TEST_CASE("that a step which one of them cannot make is made by none") {
    const auto freeze = [](NodeProgram& program) { program.second->bias.set_requires_grad(false); };
    const std::vector<NodeOutcome> outcomes = run_nodes(
        2,
        [](NodeProgram& program) {
          program.before_step = [second = program.second](Model&, Optimizer&) {
            Tensor(second->bias).set_requires_grad(true);  // nothing would train it
          };
        },
        freeze);
    CHECK(outcomes[1].step_error.starts_with("[model] parameter '1.bias' was frozen when the optimizer was made"));
    CHECK(outcomes[0].step_error.starts_with(
        "[distributed] a call of model 1 (Sequential) failed on rank 1 ([model] parameter '1.bias' was frozen"));
  }
}
