#include <roundpipe/command/step_record.h>

#include <cmath>

#include <doctest/doctest.h>

using namespace roundpipe;

TEST_CASE("step record: a line for people") {
  StepRecord record{.step = 3, .loss = 1.5, .grad_norm = 0.25, .learning_rate = 1e-3, .seconds = 60, .tokens = 600};
  record.device_bytes = 3'000'000'000;
  record.host_bytes = 2'000'000'000;
  CHECK(record.text() == "loss 1.5000  norm 0.25  rate 0.001  10 tokens/s  3.00 GB a device, 2.00 GB host");
  record.device_bytes = 12'345'678;
  CHECK(record.text().ends_with("  12.35 MB a device, 2.00 GB host"));
  record.device_bytes = 3'000'000'000;
  record.busy = 0.5;
  record.loss_scale = 65536;
  record.skipped_steps = 2;
  record.tokens = 60'000'000;
  CHECK(record.text() ==
        "loss 1.5000  norm 0.25  rate 0.001  1,000,000 tokens/s  devices 50% busy  scale 65536  skipped 2  "
        "3.00 GB a device, 2.00 GB host");
  for (const auto& [tokens, shown] : {std::pair{59'940, "  999 tokens/s"}, {60'000, "  1,000 tokens/s"}}) {
    record.tokens = tokens;
    CHECK(record.text().find(shown) != std::string::npos);
  }
  record.seconds = 0;
  CHECK(record.text().find("  0 tokens/s") != std::string::npos);
  CHECK(EvaluationRecord{5, 1.25, 77}.text() == "after 5 steps: held-out loss 1.2500");
  record.accuracy = 0.625;
  CHECK(record.text().starts_with("loss 1.5000  62% right  norm 0.25  "));
  CHECK(EvaluationRecord{5, 1.25, 8, 0.75}.text() == "after 5 steps: held-out loss 1.2500, 75% right");
}

TEST_CASE("step record: a line of metrics.jsonl") {
  StepRecord record{.step = 3, .loss = std::nan(""), .grad_norm = HUGE_VAL, .learning_rate = 0.1, .seconds = 2};
  CHECK(metrics_line(record.step, record.metrics()) ==
        R"({"step":3,"loss":null,"grad_norm":null,"learning_rate":0.1,"seconds":2.0,"tokens":0,"devices_busy":null,)"
        R"("device_bytes":0,"host_bytes":0})");
  record = {.step = 4, .loss = 1.5, .busy = 0.25, .loss_scale = 1024, .skipped_steps = 7};
  CHECK(metrics_line(record.step, record.metrics()) ==
        R"({"step":4,"loss":1.5,"grad_norm":0.0,"learning_rate":0.0,"seconds":0.0,"tokens":0,"devices_busy":0.25,)"
        R"("device_bytes":0,"host_bytes":0,"loss_scale":1024.0,"skipped_steps":7})");
  CHECK(metrics_line(5, EvaluationRecord{5, 1.25, 77}.metrics()) ==
        R"({"step":5,"evaluation_loss":1.25,"evaluation_tokens":77})");
  CHECK(metrics_line(5, EvaluationRecord{5, 1.25, 8, 0.75}.metrics()) ==
        R"({"step":5,"evaluation_loss":1.25,"evaluation_accuracy":0.75,"evaluation_answers":8})");
  record.accuracy = 0.5;
  CHECK(metrics_line(record.step, record.metrics()).ends_with(R"("skipped_steps":7,"accuracy":0.5})"));
}
