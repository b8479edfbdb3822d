#include <filesystem>
#include <optional>

#include <doctest/doctest.h>

#include <roundpipe/files/manifest.h>
#include <roundpipe/roundpipe.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "../temporary_folder.h"

using namespace roundpipe;
using at::Tensor;
namespace nn = torch::nn;

namespace {

constexpr int64_t kDiskPage = 4096;

struct DiskRule {
  const char* name;
  at::ScalarType dtype;
  UpdateRule rule;
  optim::StateFormat format;
  DiskHolds holds;
};

struct DiskTraining {
  // On the disk, or in memory.
  DiskTraining(const DiskRule& kind, const support::TemporaryFolder* disk)
      : layers(seeded(kind.dtype)),
        model(layers),
        optimizer(model, kind.rule, {},
                  {.moments = kind.format.moments,
                   .masters = kind.format.masters,
                   .disk = disk == nullptr ? DiskOptions{} : DiskOptions{disk->path(), 2 * kDiskPage, kind.holds}}) {
    model.run_options().microbatches = 2;
  }
  static nn::Sequential seeded(at::ScalarType dtype) {
    at::manual_seed(4);
    nn::Sequential made{nn::Linear(5, 20), nn::Functional(torch::tanh), nn::Linear(20, 20), nn::Functional(torch::tanh),
                        nn::Linear(20, 3)};
    made->to(dtype);
    return made;
  }
  std::vector<Tensor> run(int steps, bool asynchronous) {
    std::vector<Tensor> losses;
    for (int i = 0; i < steps; ++i) {
      const Tensor batch = at::randn({8, 5}), labels = at::randn({8, 3});
      losses.push_back(model
                           .forward_backward(batch.to(layers->parameters()[0].scalar_type()), labels,
                                             [](const Tensor& out, const Tensor& label) {
                                               return (out - label).to(at::kFloat).square().sum();
                                             })
                           .loss);
      model.step(optimizer, {.asynchronous = asynchronous});
    }
    return losses;
  }
  nn::Sequential layers;
  Model model;
  Optimizer optimizer;
};

const optim::StateFormat kExact, kNarrow{optim::MomentFormat::kFloat32, optim::MasterFormat::k24Bit};

}  // namespace

TEST_CASE("disk checkpoint: the files are those of a state in memory, and both go on with the same bits") {
  const support::TemporaryFolder disk;
  const std::vector<DiskRule> rules{
      {"fp32", at::kFloat, torch::optim::AdamWOptions(0.02), kExact, DiskHolds::kMoments},
      {"8 bits", at::kBFloat16, torch::optim::AdamOptions(0.02), optim::MomentFormat::kBlockwise8Bit,
       DiskHolds::kMoments},
      {"Adafactor", at::kBFloat16, optim::Algorithm::kAdafactor, kExact, DiskHolds::kMasters},
      {"fp16", at::kHalf, torch::optim::AdamWOptions(0.02), kExact, DiskHolds::kMasters},
      {"SGD", at::kBFloat16, torch::optim::SGDOptions(0.02), kNarrow, DiskHolds::kMasters},
  };
  for (const DiskRule& rule : rules) {
    for (const bool asynchronous : {false, true}) {
      CAPTURE(rule.name);
      CAPTURE(asynchronous);
      set_devices("virtual:2");
      const support::TemporaryFolder of_memory, of_disk;
      std::vector<Tensor> losses;
      for (const bool is_on_disk : {false, true}) {
        const support::TemporaryFolder& folder = is_on_disk ? of_disk : of_memory;
        DiskTraining training(rule, is_on_disk ? &disk : nullptr);
        at::manual_seed(7);
        training.run(3, asynchronous);
        // No memory for copies: updates wait until their block is written.
        const Save save =
            save_checkpoint(folder.path(), training.model, training.optimizer, {.snapshot_memory_bytes = 1});
        losses = training.run(3, asynchronous);
        save.wait();
      }
      const std::vector<files::FileRecord> written = files::read_manifest(of_disk / "step-3").files;
      CHECK((written == files::read_manifest(of_memory / "step-3").files));
      for (const bool is_on_disk : {false, true}) {
        set_devices("virtual:3");
        DiskTraining resumed(rule, is_on_disk ? &disk : nullptr);
        // Over a state that is there.
        resumed.run(1, asynchronous);
        load_checkpoint((is_on_disk ? of_memory : of_disk).path(), resumed.model, resumed.optimizer);
        const std::vector<Tensor> again = resumed.run(3, asynchronous);
        for (size_t i = 0; i < again.size(); ++i) CHECK(at::equal(again[i], losses[i]));
      }
    }
  }
  CHECK(std::filesystem::is_empty(disk.path()));
}

TEST_CASE("disk checkpoint: masters of another format and weights of another dtype become what they do in memory") {
  set_devices("virtual:2");
  const support::TemporaryFolder disk;
  const DiskRule exact{"exact", at::kBFloat16, torch::optim::AdamWOptions(0.02), kExact, DiskHolds::kMasters};
  DiskRule narrow = exact, half = exact;
  narrow.format = kNarrow;
  half.dtype = at::kHalf;
  for (const auto& [from, to] : {std::pair{exact, narrow}, {narrow, exact}, {exact, half}, {half, narrow}}) {
    const support::TemporaryFolder folder;
    DiskTraining saved(from, nullptr);
    at::manual_seed(7);
    saved.run(2, false);
    save_checkpoint(folder.path(), saved.model, saved.optimizer).wait();
    std::vector<Tensor> losses;
    for (const bool is_on_disk : {false, true}) {
      DiskTraining resumed(to, is_on_disk ? &disk : nullptr);
      load_checkpoint(folder.path(), resumed.model, resumed.optimizer);
      at::manual_seed(8);
      const std::vector<Tensor> own = resumed.run(3, false);
      for (size_t i = 0; i < losses.size(); ++i) CHECK(at::equal(own[i], losses[i]));
      losses = own;
    }
  }
}
