// The number of microbatches of a language model, which cuts its batches itself.

#include <roundpipe/roundpipe.h>

#include <doctest/doctest.h>

#include "small_model.h"

using namespace roundpipe;
using namespace roundpipe::support;

TEST_CASE("the planner chooses the number of microbatches of a language model, once") {
  set_devices("virtual:2");
  const ModelFolder folder;
  LanguageModelOptions options;
  options.model.run.microbatches = kAutoMicrobatches;
  LanguageModel model(folder.path(), options);
  LanguageBatch batch;
  batch.ids = (at::arange(6 * 9) * 7).remainder(23).view({6, 9});
  batch.labels = batch.ids.clone();
  const double before = model.evaluate(batch).mean;
  CHECK_FALSE(model.model().auto_microbatches());
  const double loss = model.forward_backward(batch).loss.item<double>();
  model.model().synchronize();
  CHECK(loss == doctest::Approx(before).epsilon(1e-5));
  const std::optional<int> chosen = model.model().auto_microbatches();
  REQUIRE(chosen);
  CHECK(model.model().last_step_plan()->microbatches == *chosen);

  // The same number, asked for, gives the same bits.
  options.model.run.microbatches = *chosen;
  LanguageModel asked(folder.path(), options);
  CHECK(asked.forward_backward(batch).loss.item<double>() == loss);
}
