#include <roundpipe/optim/block_states.h>

#include <atomic>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/optim/block_optimizer.h>
#include <roundpipe/optim/thread_pool.h>

#include "../files/faulty_files.h"
#include "../temporary_folder.h"

using namespace roundpipe::optim;
using roundpipe::DiskHolds;
using roundpipe::memory::GradientBlock;
using roundpipe::memory::NamedTensor;
using roundpipe::memory::ParameterBlock;
using roundpipe::storage::DiskTier;

namespace {

// Several blocks that are stepped side by side, one optimizer for each.
struct Blocks {
  Blocks(Algorithm algorithm, StateFormat format, const std::shared_ptr<DiskTier>& tier,
         DiskHolds holds = DiskHolds::kMoments)
      : is_narrow(format.masters == MasterFormat::k24Bit), rests(kBlocks) {
    at::manual_seed(1);
    for (size_t b = 0; b < kBlocks; ++b) {
      // Only bf16 has masters of 24 bits.
      const auto as = [&](at::ScalarType dtype) { return is_narrow ? at::kBFloat16 : dtype; };
      const std::vector<NamedTensor> named = {{"a", at::randn({16, 8}).to(at::kBFloat16)},
                                              {"b", at::randn({8, 40}).t().to(as(at::kFloat))},
                                              {"c", at::randn({300}).to(as(at::kHalf))},
                                              {"d", at::randn({7}).to(as(at::kFloat))}};
      blocks.push_back(std::make_unique<ParameterBlock>(named, /*pinned=*/false));
      weights.push_back(blocks.back()->current()->flat);
    }
    bind(algorithm, format, tier, holds);
  }
  // Other optimizers, of the same masters.
  void bind(Algorithm algorithm, StateFormat format, const std::shared_ptr<DiskTier>& tier, DiskHolds holds) {
    std::vector<std::unique_ptr<BlockOptimizer>> made;
    for (size_t b = 0; b < kBlocks; ++b) {
      made.push_back(std::make_unique<BlockOptimizer>(*blocks[b], std::vector<int>{0, 0, 0, 0}, rests[b], algorithm,
                                                      format, std::vector<ElementRange>(), b));
      if (tier) made.back()->keep_on(tier, b, holds);
      made.back()->prepare_masters();
    }
    for (const auto& each : made) each->take_masters();
    optimizers = std::move(made);
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
      for (size_t i = 0; i < 4; ++i) {
        const at::Tensor rest = optimizers[b]->remainder_copy(i), other_rest = other.optimizers[b]->remainder_copy(i);
        REQUIRE(rest.defined() == other_rest.defined());
        if (rest.defined()) CHECK(at::equal(rest, other_rest));
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
  const bool is_narrow;
  ThreadPool pool{2};
  std::vector<Remainders> rests;
  std::vector<std::unique_ptr<ParameterBlock>> blocks;
  std::vector<std::unique_ptr<BlockOptimizer>> optimizers;
  std::vector<at::Tensor> weights;
};

// With a window for one block.
struct Disk {
  Disk(const std::string& folder, const Blocks& blocks, DiskHolds holds,
       roundpipe::files::FileSystem& files = roundpipe::files::FileSystem::of_disk_tier())
      : bytes(blocks.optimizers[0]->stored_bytes({Hyperparameters()}, holds)),
        tier(std::make_shared<DiskTier>(folder, std::vector<int64_t>(Blocks::kBlocks, bytes), bytes, files)) {}
  const int64_t bytes;
  const std::shared_ptr<DiskTier> tier;
};

}  // namespace

TEST_CASE("block states: on a disk, every rule has the bits that it has in memory") {
  const roundpipe::support::TemporaryFolder folder;
  for (const Algorithm algorithm : {Algorithm::kAdamW, Algorithm::kRprop, Algorithm::kAdafactor, Algorithm::kSGD}) {
    for (const MomentFormat format : {MomentFormat::kFloat32, MomentFormat::kBlockwise8Bit}) {
      if (format == MomentFormat::kBlockwise8Bit && algorithm != Algorithm::kAdamW) continue;
      CAPTURE(static_cast<int>(algorithm));
      for (const DiskHolds holds : {DiskHolds::kMoments, DiskHolds::kMasters}) {
        Blocks in_memory(algorithm, format, nullptr);
        const Disk disk(folder.path(), in_memory, holds);
        Blocks on_disk(algorithm, format, disk.tier, holds);
        CHECK(on_disk.optimizers[0]->remainder(0).is_meta() == (holds == DiskHolds::kMasters));
        for (int step = 0; step < 3; ++step) {
          in_memory.step(step);
          on_disk.step(step);
          on_disk.check_same(in_memory);
        }
        disk.tier->raise();
        CHECK(disk.tier->stats().most_memory_bytes <= disk.bytes);
      }
    }
  }
}

TEST_CASE("block states: masters go to a disk, from one to another, and back, in any format") {
  const roundpipe::support::TemporaryFolder folder;
  for (const MasterFormat masters : {MasterFormat::kFloat32, MasterFormat::k24Bit}) {
    // Exact masters as well, where all are bf16.
    const StateFormat format{MomentFormat::kFloat32, masters};
    const StateFormat other{MomentFormat::kFloat32, MasterFormat::kFloat32};
    Blocks in_memory(Algorithm::kSGD, format, nullptr), moved(Algorithm::kSGD, format, nullptr);
    int step = 0;
    for (const bool is_on_disk : {true, true, false, true}) {
      const StateFormat& next = step % 2 == 0 ? other : format;
      const Disk disk(folder.path(), moved, DiskHolds::kMasters);
      in_memory.bind(Algorithm::kSGD, next, nullptr, DiskHolds::kMoments);
      moved.bind(Algorithm::kSGD, next, is_on_disk ? disk.tier : nullptr, DiskHolds::kMasters);
      CHECK(moved.optimizers[0]->remainder(0).is_meta() == is_on_disk);
      moved.check_same(in_memory);
      in_memory.step(step);
      moved.step(step++);
      moved.check_same(in_memory);
    }
  }
}

TEST_CASE("block states: masters on a disk start again where the user has written, and take saved ones") {
  const roundpipe::support::TemporaryFolder folder;
  Blocks in_memory(Algorithm::kAdamW, {}, nullptr);
  const Disk disk(folder.path(), in_memory, DiskHolds::kMasters);
  Blocks on_disk(Algorithm::kAdamW, {}, disk.tier, DiskHolds::kMasters);
  for (Blocks* const each : {&in_memory, &on_disk}) {
    each->step(1);
    const auto weight = [&](size_t i) { return each->blocks[0]->layout().view(each->weights[0], i); };
    for (const size_t i : {0, 2}) {
      weight(i).fill_(0.75F);
      each->optimizers[0]->note_written(i);
    }
    each->optimizers[0]->restart_masters(each->weights[0]);
    for (const size_t i : {0, 1}) {
      weight(i).fill_(0.5F);
      each->optimizers[0]->note_written(i);
    }
    each->optimizers[1]->set_remainder(0, at::full({16, 8}, 3, at::kChar));
    each->step(2);
  }
  on_disk.check_same(in_memory);
}

TEST_CASE("block states: what the user has written is not lost where the disk does not give back a master") {
  roundpipe::files::test::FaultyFiles faulty("disk");
  const roundpipe::support::TemporaryFolder folder;
  std::atomic<bool> is_broken{false};
  faulty.fault = [&](roundpipe::files::Call call, const std::string&, int) {
    return call == roundpipe::files::Call::kRead && is_broken ? EIO : 0;
  };
  Blocks in_memory(Algorithm::kAdamW, {}, nullptr);
  const Disk disk(folder.path(), in_memory, DiskHolds::kMasters, faulty);
  Blocks on_disk(Algorithm::kAdamW, {}, disk.tier, DiskHolds::kMasters);
  for (Blocks* const each : {&in_memory, &on_disk}) {
    each->step(1);
    each->blocks[4]->layout().view(each->weights[4], 2).fill_(0.75F);
    each->optimizers[4]->note_written(2);
    if (each == &on_disk) {
      disk.tier->settle();
      is_broken = true;
      CHECK_THROWS_AS(each->step(2), roundpipe::storage::Unreadable);
      CHECK_THROWS_AS(each->optimizers[4]->restart_masters(each->weights[4]), roundpipe::storage::Unreadable);
      is_broken = false;
    }
    each->step(2);
  }
  on_disk.check_same(in_memory);
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
