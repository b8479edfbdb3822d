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
Chain seeded_twin(const Chain& like) {
  at::manual_seed(5);
  return like.twin();
}

struct OnDisk {
  explicit OnDisk(const Chain& like, int64_t memory_bytes = kPage, files::FileSystem* file_system = nullptr,
                  const TemporaryFolder& folder = own_folder())
      : chain(seeded_twin(like)),
        model(chain.layers()),
        optimizer(model, torch::optim::AdamWOptions(0.01), {}, {.disk = {folder.path(), memory_bytes, file_system}}) {
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

Step train(Model& model, Optimizer& optimizer, uint64_t number, const StepOptions& options) {
  const Sample batch = sample(number);
  model.forward_backward(batch.inputs, batch.labels, squared_error);
  return model.step(optimizer, options);
}

struct InMemory {
  explicit InMemory(const Chain& like)
      : chain(seeded_twin(like)), model(chain.layers()), optimizer(model, torch::optim::AdamWOptions(0.01)) {
    model.run_options().microbatches = 3;
  }
  Chain chain;
  Model model;
  Optimizer optimizer;
};

std::vector<Tensor> state(Chain& chain, Model& model) {
  model.synchronize();
  return copies_of(chain.parameters());
}

}  // namespace

TEST_CASE("disk: the bits are those of moments in memory, on any devices, however much memory there is") {
  int cases = 0;
  for (const bool asynchronous : {false, true}) {
    for (const bool clips : {false, true}) {
      for (const int64_t pages : {1, 2, 100}) {
        CAPTURE(asynchronous);
        CAPTURE(clips);
        CAPTURE(pages);
        set_devices(concat("virtual:", 1 + cases++ % 4));
        StepOptions options{.asynchronous = asynchronous};
        if (clips) options.max_grad_norm = 0.5;
        const Chain start;
        InMemory plain(start);
        OnDisk disk(start, pages * kPage);
        for (uint64_t number = 0; number < 3; ++number) {
          train(plain.model, plain.optimizer, number, options);
          train(disk.model, disk.optimizer, number, options);
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

TEST_CASE("disk: a write that fails is told at the next step, and loses nothing") {
  set_devices("virtual:2");
  for (const bool asynchronous : {false, true}) {
    FaultyFiles faulty("disk");
    std::atomic<bool> is_full{false};
    faulty.fault = [&](Call call, const std::string&, int) { return call == Call::kWrite && is_full ? ENOSPC : 0; };
    const Chain start;
    InMemory plain(start);
    OnDisk disk(start, kPage, &faulty);
    const StepOptions options{.asynchronous = asynchronous};
    train(plain.model, plain.optimizer, 0, options);
    train(disk.model, disk.optimizer, 0, options);
    disk.model.synchronize();
    plain.model.synchronize();
    disk.optimizer.core()->disk_tier()->settle();
    is_full = true;
    train(plain.model, plain.optimizer, 1, options);
    train(disk.model, disk.optimizer, 1, options).wait();
    disk.optimizer.core()->disk_tier()->settle();
    const std::string told = files::test::error_of<Error>([&] { disk.model.synchronize(); });
    plain.model.synchronize();
    CHECK(contains(told, "No space left on device"));
    CHECK(contains(told, OnDisk::own_folder().path()));
    const Sample batch = sample(2);
    for (Model* const model : {&plain.model, &disk.model})
      model->forward_backward(batch.inputs, batch.labels, squared_error);
    // It has not become better, so no step is made, which would use more memory.
    CHECK_THROWS_AS(disk.model.step(disk.optimizer, options), Error);
    CHECK(disk.optimizer.steps() == 2);
    is_full = false;
    disk.model.step(disk.optimizer, options);
    plain.model.step(plain.optimizer, options);
    CHECK(same_state(state(disk.chain, disk.model), state(plain.chain, plain.model)));
  }
}

TEST_CASE("disk: a layer whose moments cannot be read stays as it was, and the step fails") {
  set_devices("virtual:1");
  FaultyFiles faulty("disk");
  std::atomic<bool> is_broken{false};
  faulty.fault = [&](Call call, const std::string&, int) { return call == Call::kRead && is_broken ? EIO : 0; };
  OnDisk disk(Chain(), kPage, &faulty);
  train(disk.model, disk.optimizer, 0, {}).wait();
  disk.model.synchronize();
  const std::vector<Tensor> before = state(disk.chain, disk.model);
  is_broken = true;
  const Step step = train(disk.model, disk.optimizer, 1, {});
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
  train(disk.model, disk.optimizer, 2, {}).wait();
  disk.model.synchronize();
}

TEST_CASE("disk: what does not fit is refused before anything is changed") {
  set_devices("virtual:1");
  const TemporaryFolder folder;
  FaultyFiles faulty("disk");
  faulty.fault = [&](Call call, const std::string&, int) { return call == Call::kReserve ? ENOSPC : 0; };
  const Chain start;
  CHECK_THROWS_AS(OnDisk(start, kPage, &faulty), Error);
  CHECK_THROWS_AS(OnDisk(start, 100), std::invalid_argument);
}

TEST_CASE("disk: what is in memory, and what is beside it") {
  set_devices("virtual:1");
  const Chain start;
  InMemory plain(start);
  OnDisk disk(start, 2 * kPage);
  const auto in_memory = plain.optimizer.core()->host_bytes(), on_disk = disk.optimizer.core()->host_bytes();
  CHECK(in_memory.moments_on_disk == 0);
  CHECK(on_disk.moments + on_disk.moments_on_disk == in_memory.moments);
}
