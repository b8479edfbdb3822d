#include <roundpipe/optim/block_states.h>

#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/optim/block_optimizer.h>
#include <roundpipe/optim/thread_pool.h>

#include "../temporary_folder.h"

using namespace roundpipe::optim;
using roundpipe::memory::GradientBlock;
using roundpipe::memory::NamedTensor;
using roundpipe::memory::ParameterBlock;
using roundpipe::storage::DiskTier;

namespace {

// Several blocks that are stepped side by side, one optimizer for each.
struct Blocks {
  Blocks(Algorithm algorithm, MomentFormat format, const std::shared_ptr<DiskTier>& tier) : rests(kBlocks) {
    at::manual_seed(1);
    for (size_t b = 0; b < kBlocks; ++b) {
      const std::vector<NamedTensor> named = {{"a", at::randn({16, 8}).to(at::kBFloat16)},
                                              {"b", at::randn({8, 40}).t()},
                                              {"c", at::randn({300}).to(at::kHalf)},
                                              {"d", at::randn({7})}};
      blocks.push_back(std::make_unique<ParameterBlock>(named, /*pinned=*/false));
      optimizers.push_back(
          std::make_unique<BlockOptimizer>(*blocks.back(), std::vector<int>{0, 0, 0, 0}, rests[b], algorithm, format));
      if (tier) optimizers.back()->states().keep_on(tier, b);
      weights.push_back(blocks.back()->current()->flat);
    }
  }
  // In the first step, some parameters have no gradients.
  void step(int number) {
    at::manual_seed(100 + number);
    for (size_t b = kBlocks; b-- > 0;) {
      GradientBlock gradients;
      gradients.flat = blocks[b]->buffers()->take();
      for (size_t i = 0; i < 4; ++i) {
        gradients.received.push_back(number > 0 || i != b % 4);
        const at::Tensor target = blocks[b]->layout().view(gradients.flat, i);
        target.copy_(at::randn(target.sizes()));
      }
      optimizers[b]->update(weights[b], gradients.flat, gradients, blocks[b]->layout(), {Hyperparameters()}, {}, pool);
      weights[b] = gradients.flat;
    }
  }
  void check_same(Blocks& other) {
    for (size_t b = 0; b < kBlocks; ++b) {
      for (size_t i = 0; i < 4; ++i) {
        const auto weight = [&](const at::Tensor& flat) { return blocks[b]->layout().view(flat, i); };
        CHECK(at::equal(weight(weights[b]), weight(other.weights[b])));
      }
      BlockStates::Hold own = optimizers[b]->states().hold(), others = other.optimizers[b]->states().hold();
      for (size_t i = 0; i < 4; ++i) {
        CHECK(own[i].scalars.step == others[i].scalars.step);
        REQUIRE(own[i].tensors.size() == others[i].tensors.size());
        for (size_t t = 0; t < own[i].tensors.size(); ++t) CHECK(at::equal(own[i].tensors[t], others[i].tensors[t]));
      }
    }
  }

  static constexpr size_t kBlocks = 5;
  ThreadPool pool{2};
  std::vector<std::vector<at::Tensor>> rests;
  std::vector<std::unique_ptr<ParameterBlock>> blocks;
  std::vector<std::unique_ptr<BlockOptimizer>> optimizers;
  std::vector<at::Tensor> weights;
};

}  // namespace

TEST_CASE("block states: on a disk, every rule has the bits that it has in memory") {
  const roundpipe::support::TemporaryFolder folder;
  for (const Algorithm algorithm : {Algorithm::kAdamW, Algorithm::kRprop, Algorithm::kAdafactor, Algorithm::kSGD}) {
    for (const MomentFormat format : {MomentFormat::kFloat32, MomentFormat::kBlockwise8Bit}) {
      if (format == MomentFormat::kBlockwise8Bit && algorithm != Algorithm::kAdamW) continue;
      CAPTURE(static_cast<int>(algorithm));
      Blocks in_memory(algorithm, format, nullptr);
      const int64_t bytes = in_memory.optimizers[0]->stored_moment_bytes({Hyperparameters()});
      const auto tier = std::make_shared<DiskTier>(folder.path(), std::vector<int64_t>(Blocks::kBlocks, bytes), bytes);
      Blocks on_disk(algorithm, format, tier);
      for (int step = 0; step < 3; ++step) {
        in_memory.step(step);
        on_disk.step(step);
        on_disk.check_same(in_memory);
      }
      tier->raise();
      CHECK(tier->stats().most_memory_bytes <= 2 * bytes);  // while a block grows
    }
  }
}

TEST_CASE("block states: on a disk, tensors have shapes without values, until the state is held") {
  const roundpipe::support::TemporaryFolder folder;
  Blocks blocks(Algorithm::kAdamW, MomentFormat::kFloat32,
                std::make_shared<DiskTier>(folder.path(), std::vector<int64_t>(Blocks::kBlocks, 8192), 8192));
  BlockStates& states = blocks.optimizers[0]->states();
  CHECK_FALSE(states.has(1));
  CHECK(states.hold()[1].tensors.empty());
  blocks.step(1);
  CHECK(states.has(1));
  CHECK(states[1].tensors[0].is_meta());
  CHECK(states[1].tensors[0].strides() == at::IntArrayRef({1, 40}));
  const ParameterState other{{.step = 9}, {at::full({40, 8}, 2.0F), at::full({40, 8}, 3.0F)}};
  states.set(1, other);
  {
    BlockStates::Hold hold = states.hold();
    CHECK(hold[1].scalars.step == 9);
    CHECK(at::equal(hold[1].tensors[1], other.tensors[1]));
    CHECK(hold[3].tensors[0].count_nonzero().item<int64_t>() == 7);  // as it was
  }
  states.set(1, {});
  CHECK_FALSE(states.has(1));
}
