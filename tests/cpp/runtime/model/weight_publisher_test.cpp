#include <roundpipe/runtime/model/weight_publisher.h>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>

#include "support/model.h"

using namespace roundpipe;
using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;

namespace weight_publisher_test {

constexpr int64_t kWidth = 4;

struct Published {
  std::shared_ptr<ModelState> model = std::make_shared<ModelState>("m", made(), /*pinned=*/false);
  WeightPublisher publisher{model};
  at::Tensor weights = model->blocks[0].block->parameters()[0].tensor;
  at::Tensor copy = at::full_like(weights.detach(), 3.0);

  Published() {
    std::vector<at::Tensor> parameters = {copy};
    for (size_t i = 1; i < model->blocks[0].block->parameters().size(); ++i) {
      parameters.push_back(at::zeros_like(model->blocks[0].block->parameters()[i].tensor.detach()));
    }
    publisher.set_optimizer_parameters({parameters});
  }

  static std::vector<std::unique_ptr<Layer>> made() {
    std::vector<std::unique_ptr<Layer>> layers;
    layers.push_back(std::make_unique<NativeLayer>(linear_layer("a", kWidth)));
    return layers;
  }
};

TEST_SUITE("weight_publisher") {
  TEST_CASE("calls read the values of the moment in which the update is made") {
    for (const bool in_place : {true, false}) {
      Published of;
      const std::unique_ptr<WeightUpdate> update = of.publisher.begin_update(in_place);
      const memory::WeightVersionPtr read = of.model->blocks[0].block->current();
      CHECK_FALSE(read->published->complete());
      of.copy.fill_(5.0);
      update->make();
      CHECK(read->published->complete());
      of.model->blocks[0].block->repoint();
      CHECK(at::equal(of.weights, at::full_like(of.copy, 5.0)));
    }
  }

  TEST_CASE("an update that is dropped unmade fails whoever waits for the weights") {
    Published of;
    of.publisher.begin_update(/*in_place=*/false).reset();
    const memory::WeightVersionPtr read = of.model->blocks[0].block->current();
    CHECK_THROWS_WITH_AS(read->published->wait(), doctest::Contains("[step] an update of the weights was dropped"),
                         Error);
  }
}

}  // namespace weight_publisher_test
