#include <roundpipe/runs/save_work.h>

#include <fstream>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/memory/host_arena.h>
#include <roundpipe/roundpipe.h>
#include <roundpipe/saving/stored_checkpoint.h>
#include <torch/nn/modules/linear.h>

#include "saved_ranks.h"

using namespace roundpipe;
using nlohmann::ordered_json;

namespace {

// What a process that trains nothing writes.
std::shared_ptr<Contents> contents_of(int64_t rank = 0, int64_t size = 1, int64_t steps = 1) {
  auto contents = std::make_shared<Contents>(rank, size);
  ordered_json common{{"step", 4},
                      {"steps", steps},
                      {"versions", {{"test", std::to_string(rank)}}},
                      {"dtypes", ordered_json::object()},
                      {"outside", ordered_json::object()},
                      {"tied", ordered_json::object()}};
  const StateValue random = StateValue::dict({{"torch", at::zeros({8}, at::kByte)}});
  ordered_json own{{"pipelines", ordered_json::object()},
                   {"random", contents->own_encoder().encode(random, "random")},
                   {"state", ordered_json::object()}};
  if (size == 1) common.update(own);
  contents->set_states(common, own);
  return contents;
}

}  // namespace

TEST_SUITE("save work") {
  TEST_CASE("weights are cut into files, with an index, and come back") {
    const support::TemporaryFolder folder;
    const auto contents = contents_of();
    std::map<std::string, at::Tensor> weights;
    for (int i = 0; i < 5; ++i) {
      const std::string name = "layer" + std::to_string(i);
      weights[name] = at::arange(100, at::kFloat) + i;
      contents->add(kWeights, {name, weights[name].to(at::kBFloat16), std::nullopt, weights[name]});
    }
    SaveWork::Settings settings = settings_of(folder.path());
    settings.shard_bytes = 400;
    const auto work = save(std::move(settings), contents);
    CHECK(work->wait().bytes > 1000);
    const StoredCheckpoint stored(work->folder());
    std::ifstream file(work->folder() + "/" + kIndexFile);
    const nlohmann::json index = nlohmann::json::parse(file);
    CHECK(index.at("metadata").at("total_size") == 1000);
    CHECK(index.at("weight_map").at("layer1") == "model-00001-of-00003.safetensors");
    CHECK(index.at("weight_map").at("layer4") == "model-00003-of-00003.safetensors");
    StoredCheckpoint::Destinations taken;
    for (const auto& [name, values] : weights) {
      CHECK(stored.section(kWeights).at(name).file == index.at("weight_map").at(name));
      taken[kWeights].emplace_back(name, at::empty(100, at::kFloat));
    }
    stored.read(taken);
    for (const auto& [name, values] : taken[kWeights]) CHECK(at::equal(values, weights[name].to(at::kBFloat16)));
  }

  TEST_CASE("an adapter has one file, whatever its size, and what is copied may change") {
    const support::TemporaryFolder folder;
    const auto contents = std::make_shared<Contents>(0, 1, true);
    for (const char* const name : {"a", "b"}) contents->add(kWeights, {name, at::zeros(100)});
    const std::vector<Contents::File> files = contents->tensor_files(1);
    REQUIRE(files.size() == 1);
    CHECK(files[0].name == "adapter_model.safetensors");
    const at::Tensor given = at::zeros(3);
    contents->add(kGradients, {"g", given});
    contents->encoder().encode(given, "v", /*copies_tensors=*/false);
    CHECK(contents->plain_bytes() == 800 + 24);
    contents->copy_plain();
    given.fill_(1);
    CHECK(contents->sections().back().second.front().source().sum().item<float>() == 0);
    CHECK(contents->encoder().tensors().front().second.sum().item<float>() == 0);
  }

  TEST_CASE("ranks write one checkpoint, and each what only it has") {
    const support::TemporaryFolder folder;
    std::vector<std::shared_ptr<Contents>> contents;
    for (int64_t rank = 0; rank < 2; ++rank) {
      contents.push_back(contents_of(rank, 2));
      contents.back()->add(rank == 0 ? kWeights : kBuffers, {"same", at::ones(2)});
      contents.back()->add(rank == 0 ? kWeights : kBuffers, {"own", at::full(2, rank)});
      contents.back()->add(kGradients, {"g", at::full(3, rank)});
    }
    contents[1]->leave_out_buffers(contents[0]->buffer_fingerprints());
    Together together(2);
    for (const auto& work : save_together(folder.path(), together, contents)) work->wait();
    StoredCheckpoint stored(folder.path() + "/step-4");
    CHECK(stored.nodes() == 2);
    CHECK(stored.section(kWeights).size() == 2);
    CHECK(stored.sections(0).size() == 1);
    CHECK(stored.sections(1).at(kBuffers).size() == 1);
    CHECK(stored.sections(1).at(kGradients).at("g").file == "rank-00001-gradients.safetensors");
    for (int64_t rank = 0; rank < 2; ++rank)
      CHECK(stored.value(stored.state(rank).at("random"), "random", rank).at("torch").as_tensor().numel() == 8);
    CHECK(stored.fingerprint(stored.state(0).at("random"), 0) == stored.fingerprint(stored.state(1).at("random"), 1));
    stored.verify_rest();
  }

  TEST_CASE("ranks whose common state differs write nothing") {
    const support::TemporaryFolder folder;
    Together together(2);
    for (const auto& work : save_together(folder.path(), together, {contents_of(0, 2, 7), contents_of(1, 2, 8)}))
      CHECK_THROWS_WITH_AS(work->wait(), doctest::Contains("differ between rank 0 and rank 1"), Error);
    CHECK_FALSE(latest(folder.path()));
  }

  TEST_CASE("a save that fails tells it unless somebody waits, and leaves nothing") {
    const support::TemporaryFolder folder;
    std::string told;
    SaveWork::Settings settings = settings_of(folder.path());
    settings.tell = [&](const std::string& line) { told = line; };
    settings.text_of = [](const std::exception_ptr&) { return "[x] it broke"; };
    const auto contents = contents_of();
    const auto work = save(std::move(settings), contents, [] { throw std::invalid_argument("[x] it broke"); });
    work->wait_over();
    work->wait_read();
    CHECK(work->done());
    CHECK(told == "[x] it broke\n[save_checkpoint] step 4 was not saved; training goes on");
    CHECK_THROWS_AS(work->wait(), std::invalid_argument);
    CHECK_FALSE(latest(folder.path()));
  }

  TEST_CASE("a save may hold what the host's budget leaves, and at least two blocks") {
    set_devices("virtual:1");
    const Model model(torch::nn::Sequential(torch::nn::Linear(5, 9), torch::nn::Linear(9, 3)));
    const int64_t asked_bytes = memory::host_arena_stats().asked_bytes;
    const auto held = [&](std::optional<int64_t> budget) {
      return default_snapshot_bytes({model.shared_pipeline()}, budget);
    };
    CHECK(held(asked_bytes + 100'000) == 100'000);
    CHECK(held(asked_bytes) == 2 * (9 * 5 + 9) * 16);
    CHECK(held(std::nullopt) >= held(asked_bytes));
  }
}
