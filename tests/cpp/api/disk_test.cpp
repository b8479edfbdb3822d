#include <atomic>

#include <doctest/doctest.h>

#include <roundpipe/runtime/model_optimizer.h>

#include "../files/faulty_files.h"
#include "../temporary_folder.h"
#include "support/chain.h"

using namespace roundpipe;
using namespace roundpipe::support;
using files::Call;
using files::test::contains;
using files::test::FaultyFiles;

namespace {

// Every block of a chain takes one page.
constexpr int64_t kPage = 4096;

// With the random numbers of every other one.
Chain seeded_twin(const Chain& like, at::ScalarType dtype) {
  at::manual_seed(5);
  Chain made = like.twin();
  for (torch::nn::Module* const part :
       std::initializer_list<torch::nn::Module*>{made.first.get(), made.norm.get(), made.middle.get(), made.last.get()})
    part->to(dtype);
  return made;
}

// What the disk holds, and weights that have it.
struct Held {
  DiskHolds holds;
  at::ScalarType dtype;
};
constexpr Held kMoments{DiskHolds::kMoments, at::kFloat};
constexpr Held kMasters{DiskHolds::kMasters, at::kBFloat16}, kWholeMasters{DiskHolds::kMasters, at::kHalf};

struct OnDisk {
  explicit OnDisk(const Chain& like, const Held& held = kMoments, int64_t memory_bytes = kPage,
                  files::FileSystem* file_system = nullptr, const TemporaryFolder& folder = own_folder())
      : chain(seeded_twin(like, held.dtype)),
        model(chain.layers()),
        optimizer(model, torch::optim::AdamWOptions(0.01), {},
                  {.disk = {folder.path(), memory_bytes, held.holds, file_system}}) {
    model.run_options().microbatches = 3;
  }
  static const TemporaryFolder& own_folder() {
    static const TemporaryFolder folder;
    return folder;
  }
  Chain chain;
  Model model;
  Optimizer optimizer;
};

struct InMemory {
  explicit InMemory(const Chain& like, const Held& held = kMoments)
      : chain(seeded_twin(like, held.dtype)),
        model(chain.layers()),
        optimizer(model, torch::optim::AdamWOptions(0.01)) {
    model.run_options().microbatches = 3;
  }
  Chain chain;
  Model model;
  Optimizer optimizer;
};

// Of an InMemory or OnDisk.
void call(auto& training, const Sample& batch) {
  const Tensor inputs = batch.inputs.to(training.chain.first->weight.scalar_type());
  training.model.forward_backward(inputs, batch.labels, squared_error);
}

Step train(auto& training, uint64_t number, const StepOptions& options) {
  call(training, sample(number));
  return training.model.step(training.optimizer, options);
}

std::vector<Tensor> state(Chain& chain, Model& model) {
  model.synchronize();
  return copies_of(chain.parameters());
}

}  // namespace

TEST_CASE("disk: the bits are those of a state in memory, on any devices, however much memory there is") {
  int cases = 0;
  for (const Held& held : {kMoments, kMasters}) {
    for (const bool asynchronous : {false, true}) {
      for (const bool clips : {false, true}) {
        for (const int64_t pages : {1, 2, 100}) {
          CAPTURE(held.dtype);
          CAPTURE(asynchronous);
          CAPTURE(clips);
          CAPTURE(pages);
          set_devices(concat("virtual:", 1 + cases++ % 4));
          StepOptions options{.asynchronous = asynchronous};
          if (clips) options.max_grad_norm = 0.5;
          const Chain start;
          InMemory plain(start, held);
          OnDisk disk(start, held, pages * kPage);
          for (uint64_t number = 0; number < 3; ++number) {
            train(plain, number, options);
            train(disk, number, options);
          }
          CHECK(same_state(state(disk.chain, disk.model), state(plain.chain, plain.model)));
          const std::shared_ptr<storage::DiskTier>& tier = disk.optimizer.core()->disk_tier();
          CHECK((tier == nullptr) == (pages == 100));
          if (tier == nullptr) continue;
          CHECK(tier->stats().read_bytes > 0);
          CHECK(tier->stats().most_memory_bytes <= pages * kPage);
        }
      }
    }
  }
}

TEST_CASE("disk: masters start again where the user writes, and go on under another optimizer") {
  set_devices("virtual:2");
  for (const Held& held : {kMasters, kWholeMasters}) {
    for (const bool asynchronous : {false, true}) {
      CAPTURE(held.dtype);
      CAPTURE(asynchronous);
      const StepOptions options{.asynchronous = asynchronous};
      const Chain start;
      InMemory plain(start, held);
      OnDisk disk(start, held);
      const auto both = [&](uint64_t number, const auto& write) {
        const auto one = [&](auto& training) {
          train(training, number, options);
          training.model.synchronize();
          const at::NoGradGuard no_grad;
          write(training);
        };
        one(plain);
        one(disk);
      };
      both(0, [](auto& training) { training.chain.middle->weight.mul_(1.5); });
      both(1, [](auto& training) {
        training.chain.last->bias.fill_(0.25);
        training.model.synchronize();
      });
      const auto bind = [&](auto& training, const DiskOptions& on) {
        training.optimizer = Optimizer(training.model, torch::optim::AdamWOptions(0.02), {}, {.disk = on});
      };
      // From this disk to another, into memory, and onto a disk again.
      for (const bool is_on_disk : {true, false, true}) {
        bind(plain, {});
        bind(disk, is_on_disk ? DiskOptions{OnDisk::own_folder().path(), kPage, held.holds} : DiskOptions{});
        CHECK(disk.optimizer.core()->block(0).remainder(0).is_meta() == is_on_disk);
        both(2, [](auto&) {});
        CHECK(same_state(state(disk.chain, disk.model), state(plain.chain, plain.model)));
      }
    }
  }
}

TEST_CASE("disk: a write that fails is told at the next step, and loses nothing") {
  set_devices("virtual:2");
  for (const auto& [held, asynchronous] : {std::pair{kMoments, false}, {kMoments, true}, {kMasters, true}}) {
    FaultyFiles faulty("disk");
    std::atomic<bool> is_full{false};
    faulty.fault = [&](Call call, const std::string&, int) { return call == Call::kWrite && is_full ? ENOSPC : 0; };
    const Chain start;
    InMemory plain(start, held);
    OnDisk disk(start, held, kPage, &faulty);
    const StepOptions options{.asynchronous = asynchronous};
    train(plain, 0, options);
    train(disk, 0, options);
    disk.model.synchronize();
    plain.model.synchronize();
    disk.optimizer.core()->disk_tier()->settle();
    is_full = true;
    train(plain, 1, options);
    train(disk, 1, options).wait();
    disk.optimizer.core()->disk_tier()->settle();
    const std::string told = files::test::error_of<Error>([&] { disk.model.synchronize(); });
    plain.model.synchronize();
    CHECK(contains(told, "No space left on device"));
    CHECK(contains(told, OnDisk::own_folder().path()));
    CHECK(contains(told, "still in memory"));
    call(plain, sample(2));
    call(disk, sample(2));
    // It has not become better, so no step is made, which would use more memory.
    CHECK_THROWS_AS(disk.model.step(disk.optimizer, options), Error);
    CHECK(disk.optimizer.steps() == 2);
    is_full = false;
    disk.model.step(disk.optimizer, options);
    plain.model.step(plain.optimizer, options);
    CHECK(same_state(state(disk.chain, disk.model), state(plain.chain, plain.model)));
  }
}

TEST_CASE("disk: a layer whose state cannot be read stays as it was, and the step fails") {
  set_devices("virtual:1");
  FaultyFiles faulty("disk");
  std::atomic<bool> is_broken{false};
  faulty.fault = [&](Call call, const std::string&, int) { return call == Call::kRead && is_broken ? EIO : 0; };
  OnDisk disk(Chain(), kMasters, kPage, &faulty);
  train(disk, 0, {}).wait();
  disk.model.synchronize();
  const std::vector<Tensor> before = state(disk.chain, disk.model);
  is_broken = true;
  const Step step = train(disk, 1, {});
  CHECK_THROWS_AS(step.wait(), storage::Unreadable);
  is_broken = false;
  CHECK_THROWS_AS(disk.model.synchronize(), storage::Unreadable);  // the step's error, once
  const std::vector<Tensor> after = state(disk.chain, disk.model);
  bool any_stays = false;
  for (size_t i = 0; i < after.size(); ++i) {
    CHECK(at::isfinite(after[i]).all().item<bool>());
    any_stays |= at::equal(before[i], after[i]);
  }
  CHECK(any_stays);
  train(disk, 2, {}).wait();
  disk.model.synchronize();
}

TEST_CASE("disk: what does not fit is refused before anything is changed") {
  set_devices("virtual:1");
  const TemporaryFolder folder;
  FaultyFiles faulty("disk");
  faulty.fault = [&](Call call, const std::string&, int) { return call == Call::kReserve ? ENOSPC : 0; };
  const Chain start;
  CHECK_THROWS_AS(OnDisk(start, kMoments, kPage, &faulty), Error);
  CHECK_THROWS_AS(OnDisk(start, kMoments, 100), std::invalid_argument);
  CHECK(contains(files::test::error_of<std::invalid_argument>([&] { OnDisk(start, kMasters, 100); }),
                 "the moments and masters may take 100 B"));
  InMemory plain(start, kMasters);
  const auto bind = [&](const DiskOptions& disk) {
    return Optimizer(plain.model, torch::optim::AdamWOptions(0.01), {}, {.disk = disk});
  };
  CHECK(contains(files::test::error_of<std::invalid_argument>([&] { bind({.holds = DiskHolds::kMasters}); }),
                 "disk_holds is 'masters' without disk"));
  // The disk is full while masters go there: those in memory stay.
  faulty.fault = [&](Call call, const std::string&, int) { return call == Call::kWrite ? ENOSPC : 0; };
  CHECK_THROWS_AS(bind({folder.path(), kPage, DiskHolds::kMasters, &faulty}), Error);
  train(plain, 0, {}).wait();
  CHECK(plain.optimizer.core()->host_bytes().remainders_on_disk == 0);
}

TEST_CASE("disk: what is in memory, and what is beside it") {
  set_devices("virtual:1");
  const Chain start;
  for (const Held& held : {kMoments, kMasters, Held{DiskHolds::kMoments, at::kBFloat16}}) {
    InMemory plain(start, held);
    OnDisk disk(start, held, 2 * kPage);
    const auto in_memory = plain.optimizer.core()->host_bytes(), on_disk = disk.optimizer.core()->host_bytes();
    CHECK(in_memory.moments_on_disk + in_memory.remainders_on_disk == 0);
    CHECK(on_disk.moments + on_disk.moments_on_disk == in_memory.moments);
    CHECK(on_disk.remainders + on_disk.remainders_on_disk == in_memory.remainders);
  }
}
