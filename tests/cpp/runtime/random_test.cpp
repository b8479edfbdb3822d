#include <roundpipe/runtime/random.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <doctest/doctest.h>

using namespace roundpipe::runtime;

namespace {

const c10::Device kHost(c10::DeviceType::CPU);

at::Tensor drawn_with(uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::rand({4}, generator);
}

}  // namespace

TEST_SUITE("random") {
  // The rule is a promise: a run that is resumed with another version of this code must draw the same numbers. The
  // values come from a separate program: splitmix64's finaliser folded over base seed, FNV-1a of the name, call,
  // microbatch and layer; without the lowest bit.
  TEST_CASE("layer_seed never changes") {
    CHECK(layer_seed(0, "", 0, 0, 0) == 4441208531586492356ULL);
    CHECK(layer_seed(0, "model", 0, 0, 0) == 7801796866797479507ULL);
    CHECK(layer_seed(0, "model", 1, 0, 0) == 5075240313473008835ULL);
    CHECK(layer_seed(0, "model", 0, 1, 0) == 9131931815293541396ULL);
    CHECK(layer_seed(0, "model", 0, 0, 1) == 590028654529403877ULL);
    CHECK(layer_seed(67280421310721, "Sequential", 12345, 7, 48) == 8523355457374434258ULL);
    CHECK(layer_seed(~uint64_t{0}, "\xC3\xA9", ~uint64_t{0}, 3, 2) == 674603834866915533ULL);
  }

  TEST_CASE("layer_seed tells neighbours apart and fits a signed integer") {
    std::set<uint64_t> seeds;
    for (uint64_t base = 0; base < 3; ++base) {
      for (const char* name : {"a", "b"}) {
        for (uint64_t call = 0; call < 8; ++call) {
          for (int microbatch = 0; microbatch < 8; ++microbatch) {
            for (int layer = 0; layer < 8; ++layer) {
              const uint64_t seed = layer_seed(base, name, call, microbatch, layer);
              CHECK(seed < (uint64_t{1} << 63));
              seeds.insert(seed);
            }
          }
        }
      }
    }
    CHECK(seeds.size() == 3 * 2 * 8 * 8 * 8);
  }

  TEST_CASE("a drawing layer draws from its seed, and the caller's generator does not notice") {
    at::manual_seed(7);
    const at::Tensor expected_later = drawn_with(7);
    RandomUse use;
    for (int i = 0; i < 3; ++i) {
      at::Tensor drawn;
      with_seeded_generators(use, 11, kHost, /*watch=*/true, [&] { drawn = at::rand({4}); });
      CHECK(drawn.equal(drawn_with(11)));
      CHECK(use.state.load() == RandomUse::kDraws);
    }
    CHECK(at::rand({4}).equal(expected_later));
  }

  TEST_CASE("a layer that does not draw is found out") {
    RandomUse use;
    with_seeded_generators(use, 1, kHost, true, [] {});
    CHECK(use.state.load() == RandomUse::kNever);
  }

  TEST_CASE("a layer that draws after all runs again, seeded") {
    at::manual_seed(5);
    const at::Tensor expected_later = drawn_with(5);
    RandomUse use;
    use.state = RandomUse::kNever;
    int runs = 0;
    at::Tensor drawn;
    with_seeded_generators(use, 23, kHost, true, [&] {
      ++runs;
      drawn = at::rand({4});
    });
    CHECK(runs == 2);
    CHECK(drawn.equal(drawn_with(23)));
    CHECK(use.state.load() == RandomUse::kDraws);
    // The first, unseeded run went to nobody's account either.
    CHECK(at::rand({4}).equal(expected_later));
  }

  TEST_CASE("the generators are put back when the body throws") {
    at::manual_seed(9);
    const at::Tensor expected_later = drawn_with(9);
    RandomUse use;
    CHECK_THROWS_AS(with_seeded_generators(use, 1, kHost, true,
                                           [] {
                                             at::rand({4});
                                             throw std::runtime_error("boom");
                                           }),
                    std::runtime_error);
    CHECK(at::rand({4}).equal(expected_later));
    // And the lock is free.
    with_seeded_generators(use, 1, kHost, true, [] {});
  }

  TEST_CASE("layers that do not draw run side by side") {
    std::vector<RandomUse> uses(4);
    for (RandomUse& use : uses) use.state = RandomUse::kNever;
    // Passes only when all four are inside at once.
    std::barrier inside(4);
    std::vector<std::thread> threads;
    for (RandomUse& use : uses) {
      threads.emplace_back([&use, &inside] {
        for (int i = 0; i < 5; ++i) {
          with_seeded_generators(use, 3, kHost, true, [&inside] { inside.arrive_and_wait(); });
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  TEST_CASE("a drawing layer runs alone and draws the same whatever runs beside it") {
    at::manual_seed(3);
    const at::Tensor expected_later = drawn_with(3);
    std::atomic<int> inside{0};
    std::atomic<int> wrong{0};
    std::vector<RandomUse> uses(6);  // the even ones draw, the odd ones do not; nothing is known of them yet
    std::vector<std::thread> threads;
    for (size_t i = 0; i < uses.size(); ++i) {
      threads.emplace_back([&, i] {
        for (uint64_t seed = 0; seed < 20; ++seed) {
          at::Tensor drawn;
          with_seeded_generators(uses[i], seed, kHost, true, [&] {
            const int others = inside.fetch_add(1);
            if (i % 2 == 0) {
              if (others != 0) ++wrong;
              drawn = at::rand({4});
              std::this_thread::sleep_for(std::chrono::microseconds(200));
              if (inside.load() != 1) ++wrong;
            }
            inside.fetch_sub(1);
          });
          if (drawn.defined() && !drawn.equal(drawn_with(seed))) ++wrong;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong.load() == 0);
    CHECK(at::rand({4}).equal(expected_later));
    for (size_t i = 0; i < uses.size(); ++i) {
      CHECK(uses[i].state.load() == (i % 2 == 0 ? RandomUse::kDraws : RandomUse::kNever));
    }
  }
}
