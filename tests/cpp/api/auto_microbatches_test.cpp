#include <roundpipe/roundpipe.h>

#include <doctest/doctest.h>

#include "support/chain.h"
#include "support/frontend.h"

using namespace roundpipe;
using namespace roundpipe::support;
namespace nn = torch::nn;

namespace {

nn::Sequential chain() {
  nn::Sequential layers;
  for (int l = 0; l < 8; ++l) layers->push_back(nn::Linear(16, 16));
  return layers;
}

Model model_of(std::optional<int64_t> device_memory = std::nullopt) {
  return Model(chain(), {.run = {.microbatches = kAutoMicrobatches}, .device_memory = device_memory});
}

Tensor sum_of(const Tensor& outputs) { return outputs.sum(); }

// The number of microbatches of one step.
int train(Model& model, int64_t rows) {
  model.forward_backward(at::ones({rows, 16}), std::tuple<>(), sum_of);
  model.synchronize();
  return model.last_plan()->microbatches;
}

}  // namespace

TEST_SUITE("auto microbatches") {
  TEST_CASE("the first training call chooses, says it, and later ones keep it") {
    set_devices("virtual:2");
    Model model = model_of();
    {
      const at::NoGradGuard no_grad;
      model.forward(at::ones({2, 16}));
    }
    CHECK_FALSE(model.auto_microbatches());  // evaluation does not choose
    int first = 0;
    const std::vector<std::string> said = test_frontend.notices_of([&] { first = train(model, 32); });
    REQUIRE(said.size() == 1);
    CHECK(said[0].starts_with(concat("[model] the number of microbatches of Sequential is ", first, " (estimated")));
    CHECK(first > 2);
    CHECK(model.auto_microbatches() == first);
    for (const int64_t rows : {32, 64, 32}) CHECK(train(model, rows) == first);
    CHECK(train(model, 1) == 1);  // a batch cannot have more microbatches than rows
    CHECK(model.auto_microbatches() == first);
    Model same = model_of();
    CHECK(train(same, 32) == first);
    Model resumed = model_of();
    resumed.set_auto_microbatches(5);
    CHECK(train(resumed, 32) == 5);
    CHECK_THROWS_WITH_AS(resumed.set_auto_microbatches(0), doctest::Contains("expected at least 1 or none"),
                         std::invalid_argument);
  }

  TEST_CASE("rows bound it, and so does the caller's own cut") {
    set_devices("virtual:2");
    Model model = model_of();
    const Microbatches<Tensor> cut{{at::ones({2, 16}), at::ones({1, 16})}};
    model.forward_backward(cut, std::tuple<>(), sum_of);
    CHECK(model.last_plan()->microbatches == 2);
    CHECK_FALSE(model.auto_microbatches());
    CHECK(train(model, 2) == 2);
    CHECK(model.auto_microbatches() == 2);
    model.forward_backward(Microbatches<Tensor>{{at::ones({1, 16}), at::ones({1, 16}), at::ones({1, 16})}},
                           std::tuple<>(), sum_of);
    CHECK(model.last_plan()->microbatches == 3);
  }

  TEST_CASE("little memory asks for more of them") {
    set_devices("virtual:1");
    Model plenty = model_of(int64_t{1} << 30);
    const int few = train(plenty, 4096);
    set_devices("virtual:1");
    Model little = model_of(300'000);
    CHECK(train(little, 4096) > few);
  }
}
