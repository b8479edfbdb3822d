#include <roundpipe/cluster/heartbeat.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <roundpipe/core/error.h>

namespace roundpipe::cluster {
namespace {

using namespace std::chrono_literals;

// Of a collective. A sign is written every twentieth of it.
constexpr std::chrono::milliseconds kTimeout = 4000ms;

// A store that can be cut off from all who use it.
class CutStore : public c10d::HashStore {
 public:
  c10::intrusive_ptr<Store> clone() override { return c10::intrusive_ptr<Store>::reclaim_copy(this); }

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    require();
    ++signs;
    signs.notify_all();
    HashStore::set(key, value);
  }

  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    require();
    return HashStore::multiGet(keys);
  }

  // Blocks until all ranks together have written so many signs more.
  void wait_for_signs(int count) {
    const int end = signs + count;
    for (int now = signs; now < end; now = signs) signs.wait(now);
  }

  std::atomic<bool> is_cut = false;
  std::atomic<int> signs = 0;

 private:
  void require() const {
    if (is_cut) throw Error("[store] cut");
  }
};

// Three ranks that live in this process.
struct Ranks {
  c10::intrusive_ptr<CutStore> store = c10::make_intrusive<CutStore>();
  std::vector<std::optional<Heartbeat>> beats = std::vector<std::optional<Heartbeat>>(3);

  Ranks() {
    for (int rank = 0; rank < 3; ++rank) beats[static_cast<size_t>(rank)].emplace(store, rank, 3, kTimeout);
    store->wait_for_signs(9);
  }

  // What a rank says of a failed collective.
  std::string failure(int rank) {
    Heartbeat& beat = *beats[static_cast<size_t>(rank)];
    beat.fail("the weights of block 1", "timed out");
    try {
      beat.throw_failure();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
};

TEST_CASE("heartbeat: a rank that ended is named, and those that live are not") {
  Ranks ranks;
  CHECK_NOTHROW(ranks.beats[0]->throw_failure());
  ranks.beats[2].reset();
  CHECK(
      ranks.failure(0) ==
      "[cluster] the weights of block 1 could not be exchanged with the other nodes: rank 2 gives no sign of life: it "
      "died, hangs or is out of reach (timed out); nothing after that was updated: start all ranks again from the "
      "last checkpoint");
}

TEST_CASE("heartbeat: one that is dropped has let its store go") {
  // A process that ended in the middle of a record would leave a store in a file that others read for ever.
  Ranks ranks;
  ranks.store->wait_for_signs(3);
  for (std::optional<Heartbeat>& beat : ranks.beats) beat.reset();
  CHECK(ranks.store.use_count() == 1);
}

TEST_CASE("heartbeat: several ranks that ended") {
  Ranks ranks;
  ranks.beats[0].reset();
  ranks.beats[1].reset();
  CHECK(ranks.failure(2).find("nodes: ranks 0 and 1 give no sign of life: they died, hang") != std::string::npos);
}

TEST_CASE("heartbeat: what a rank could not exchange is told, also after it ended") {
  Ranks ranks;
  ranks.failure(1);
  ranks.store->wait_for_signs(9);
  ranks.beats[1].reset();
  const std::string said = ranks.failure(0);
  CHECK(said.find("nodes: rank 1 could not exchange the weights of block 1: timed out (timed out)") !=
        std::string::npos);
  CHECK(said.find("sign of life") == std::string::npos);
}

TEST_CASE("heartbeat: a rank that was silent before the store was gone is named") {
  Ranks ranks;
  ranks.beats[2].reset();
  ranks.store->wait_for_signs(12);  // of two ranks
  ranks.store->is_cut = true;
  for (const int rank : {0, 1}) {
    CHECK(ranks.failure(rank).find("nodes: rank 2 gives no sign of life") != std::string::npos);
  }
}

TEST_CASE("heartbeat: a store that goes first names no rank that was alive") {
  Ranks ranks;
  ranks.store->is_cut = true;
  CHECK(ranks.failure(1).find("nodes: the store of the process group does not answer: ") != std::string::npos);
}

TEST_CASE("heartbeat: without a store, the reason is all there is") {
  Heartbeat beat(nullptr, 0, 2, kTimeout);
  beat.fail("the weights of block 1", "timed out");
  CHECK_THROWS_WITH_AS(beat.throw_failure(),
                       "[cluster] the weights of block 1 could not be exchanged with the other nodes: timed out; "
                       "nothing after that was updated: start all ranks again from the last checkpoint",
                       Error);
}

}  // namespace
}  // namespace roundpipe::cluster
