#include <roundpipe/saving/snapshot.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>

#include "../rounds.h"
#include "support/model.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;
using roundpipe::saving::Snapshot;
using roundpipe::saving::SnapshotMemory;

namespace {

constexpr int64_t kWidth = 6;
constexpr int64_t kEverything = int64_t{1} << 40;

using Weights = std::map<std::pair<size_t, size_t>, at::Tensor>;  // by block and parameter

struct Run {
  Run() {
    use_devices("virtual:3,debug");
    at::manual_seed(7);
    for (int l = 0; l < 4; ++l) layers.push_back(linear_layer("layer" + std::to_string(l), kWidth));
    model = std::make_unique<PipedModel>("saved", layers, /*fused=*/true);
  }

  void call() {
    const Batch batch = make_batch(3, 4, kWidth);
    model->pipeline().forward_backward(batch.inputs, batch.labels, std::make_shared<SquaredLoss>(), false,
                                       along(fused_stages({0, 1, 2, 3, 4})));
  }
  void train(int steps, bool asynchronous) {
    for (int s = 0; s < steps; ++s) {
      call();
      model->step(0.1, asynchronous);
    }
  }
  std::shared_ptr<Snapshot> snapshot(int64_t memory_bytes, bool with_weights = true) {
    memory = std::make_shared<SnapshotMemory>(memory_bytes);
    return Snapshot::of(model->optimizer(), memory, nullptr, with_weights);
  }
  Weights settled() {
    model->synchronize();
    Weights values;
    const auto& blocks = model->pipeline().model().blocks;
    for (size_t b = 0; b < blocks.size(); ++b) {
      for (size_t i = 0; i < blocks[b].block->parameters().size(); ++i) {
        values[{b, i}] = blocks[b].block->parameters()[i].tensor.detach().clone();
      }
    }
    return values;
  }

  std::vector<LayerSpec> layers;
  std::unique_ptr<PipedModel> model;
  std::shared_ptr<SnapshotMemory> memory;
};

using Written = std::map<std::pair<Snapshot::Part, std::pair<size_t, size_t>>, at::Tensor>;

Written written(Snapshot& snapshot) {
  snapshot.wait_ready();
  std::mutex mutex;
  Written values;
  snapshot.write(
      [&](size_t index, const at::Tensor& tensor) {
        const Snapshot::Piece& piece = snapshot.pieces()[index];
        const std::lock_guard lock(mutex);
        CHECK(piece.tensor.sizes() == tensor.sizes());
        values[{piece.part, {piece.block, piece.parameter}}] = tensor.clone();
      },
      2);
  return values;
}

}  // namespace

TEST_CASE("snapshot: it has the state of its step, however far training has gone") {
  for (const bool asynchronous : {true, false}) {
    Weights expected;
    {
      Run at_rest;
      at_rest.train(3, asynchronous);
      expected = at_rest.settled();
    }
    Weights end;
    for (const int64_t memory : {int64_t{0}, kEverything}) {
      CAPTURE(asynchronous);
      CAPTURE(memory);
      Run run;
      run.train(3, asynchronous);
      const auto snapshot = run.snapshot(memory);
      Written values;
      std::thread writer([&] { values = written(*snapshot); });
      run.train(4, asynchronous);
      const Weights last = run.settled();
      writer.join();
      for (const auto& [place, value] : expected) {
        CHECK(same_bits(values.at({Snapshot::Part::kWeights, place}), value));
        CHECK(values.contains({Snapshot::Part::kPrevious, place}) == asynchronous);
        if (!end.empty()) CHECK(same_bits(last.at(place), end.at(place)));
      }
      end = last;
    }
  }
}

TEST_CASE("snapshot: with memory for all of it, nothing waits for a writer that has not begun") {
  for (const bool asynchronous : {false, true}) {
    CAPTURE(asynchronous);
    Run run;
    run.train(3, asynchronous);
    const auto snapshot = run.snapshot(kEverything);
    run.train(4, asynchronous);
    run.settled();
    CHECK(run.memory->report().total_wait_ms == 0);
    written(*snapshot);
  }
}

TEST_CASE("snapshot: its pieces are listed while the next step copies them") {
  Run run;
  for (int round = 0; round < rounds(100, 3000); ++round) {
    run.train(1, /*asynchronous=*/true);
    run.call();
    const auto snapshot = run.snapshot(kEverything);
    Written values;
    std::thread writer([&] { values = written(*snapshot); });
    run.model->step(0.1, /*asynchronous=*/true);
    writer.join();
    CHECK(values.size() > run.layers.size());
  }
}

TEST_CASE("snapshot: gradients that no step has taken") {
  Run run;
  run.train(1, true);
  run.call();
  const Written values = written(*run.snapshot(0));
  run.model->pipeline().drain();
  const auto sums = run.model->pipeline().gradients().summed();
  for (size_t b = 0; b < sums.size(); ++b) {
    for (size_t i = 0; i < sums[b].size(); ++i) {
      CHECK(same_bits(values.at({Snapshot::Part::kGradient, {b, i}}), sums[b][i]));
    }
  }
}

TEST_CASE("snapshot: weights that another node writes are left out, and not held for the next step") {
  Run run;
  run.train(2, true);
  run.call();
  const auto snapshot = run.snapshot(0, /*with_weights=*/false);
  const Written values = written(*snapshot);
  REQUIRE_FALSE(values.empty());
  for (const auto& [place, value] : values) CHECK(place.first == Snapshot::Part::kGradient);
  run.train(1, true);
  run.model->synchronize();
}

TEST_CASE("snapshot: an error of a sink ends it, and training goes on") {
  Run run;
  run.train(1, true);
  const auto snapshot = run.snapshot(0);
  snapshot->wait_ready();
  CHECK_THROWS_WITH_AS(
      snapshot->write([](size_t, const at::Tensor&) { throw std::runtime_error("the disk is full"); }, 2),
      "the disk is full", std::runtime_error);
  run.train(3, true);
  run.model->synchronize();
}

TEST_CASE("snapshot: one that is cancelled or dropped holds nobody up") {
  Run run;
  run.train(1, true);
  auto snapshot = run.snapshot(0);
  snapshot->wait_ready();
  std::thread canceller([&] { snapshot->cancel(); });
  run.train(2, true);
  run.model->synchronize();
  canceller.join();
  CHECK_THROWS_AS(snapshot->write([](size_t, const at::Tensor&) {}, 1), roundpipe::Cancelled);
  snapshot = run.snapshot(0);
  snapshot.reset();
  run.train(1, true);
  run.model->synchronize();
}
