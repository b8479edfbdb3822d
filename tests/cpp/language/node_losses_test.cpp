// The loss of a language model is the mean over the labels of all nodes, however unevenly they lie there.

#include <roundpipe/roundpipe.h>

#include <barrier>

#include <doctest/doctest.h>

#include "../local_nodes.h"
#include "small_model.h"

using namespace roundpipe;
using namespace roundpipe::support;

namespace {

// Node 0 has three rows, and node 1 a short one.
LanguageBatch batch_of(int node) {
  LanguageBatch batch;
  batch.ids = (at::arange((node == 0 ? 3 : 1) * (node == 0 ? 9 : 4)) * 7 + node).remainder(23);
  batch.ids = batch.ids.view({node == 0 ? 3 : 1, -1});
  batch.labels = batch.ids.clone();
  batch.labels[0][2] = -100;
  return batch;
}
constexpr int64_t kLabels[] = {3 * 8 - 1, 3 - 1};

LanguageModel model_in(const ModelFolder& folder) {
  LanguageModelOptions options;
  options.model.run.microbatches = 1;
  return LanguageModel(folder.path(), options);
}

std::vector<at::Tensor> weights_of(LanguageModel& model) {
  model.model().synchronize();
  std::vector<at::Tensor> weights;
  for (const auto& [name, parameter] : model.model().named_parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

}  // namespace

TEST_CASE("a language model's own loss on several nodes") {
  set_devices("virtual:1");
  const ModelFolder folder;
  // `counted`: whether each call is given the number of labels by which its node divides.
  for (const bool counted : {false, true}) {
    CAPTURE(counted);
    LanguageModel alone = model_in(folder);
    Optimizer sgd(alone.model(), torch::optim::SGDOptions(0.5));
    std::vector<double> means;
    for (const int node : {0, 1}) {
      LanguageBatch batch = batch_of(node);
      means.push_back(alone.evaluate(batch).mean);
      batch.counted = kLabels[0] + kLabels[1];
      alone.forward_backward(batch);
    }
    alone.model().step(sgd, {.asynchronous = false});
    const std::vector<at::Tensor> expected = weights_of(alone);

    const auto nodes = made_nodes(2);
    std::vector<LanguageModel> models;
    for (int rank = 0; rank < 2; ++rank) models.push_back(model_in(folder));
    std::barrier<> all_here(2);
    struct Outcome {
      double loss = 0;
      std::vector<at::Tensor> weights;
    };
    const std::vector<Outcome> outcomes = on_ranks(2, [&](int rank) {
      const auto place = static_cast<size_t>(rank);
      LanguageModel& model = models[place];
      OptimizerFormat format;
      format.nodes = nodes[place];
      Optimizer optimizer(model.model(), torch::optim::SGDOptions(0.5), {}, format);
      LanguageBatch batch = batch_of(rank);
      if (counted) batch.counted = kLabels[rank];
      Outcome outcome;
      outcome.loss = model.forward_backward(batch).loss.item<double>();
      model.model().step(optimizer, {.asynchronous = false}).wait();
      all_here.arrive_and_wait();  // nodes of one process share its devices
      outcome.weights = weights_of(model);
      return outcome;
    });
    for (size_t rank = 0; rank < 2; ++rank) {
      CHECK(outcomes[rank].loss == doctest::Approx(means[rank]).epsilon(1e-5));
      for (size_t i = 0; i < expected.size(); ++i) CHECK(at::equal(outcomes[rank].weights[i], expected[i]));
    }
  }
}
