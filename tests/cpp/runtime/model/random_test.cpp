#include <roundpipe/runtime/model/random.h>

#include <set>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <doctest/doctest.h>

using namespace roundpipe::runtime;
using roundpipe::torch_compat::OwnGenerators;

namespace random_test {

const c10::Device kHost(c10::DeviceType::CPU);

at::Tensor drawn_with(uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::rand({4}, generator);
}

TEST_SUITE("random") {
  // A promise: a resumed run draws the same numbers with any version of this code. Values from a separate program: the
  // finaliser of splitmix64 over base seed, FNV-1a of the name, call, microbatch, layer; without the lowest bit.
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

  TEST_CASE("backward_seed never changes, and is another one") {
    CHECK(backward_seed(layer_seed(0, "model", 0, 0, 0)) == 3503903682325553483ULL);
    CHECK(backward_seed(0) == 8147104208329303767ULL);
    CHECK(backward_seed(0) < (uint64_t{1} << 63));
  }

  TEST_CASE("a layer and its backward draw from their seeds, and the caller's generator does not notice") {
    at::manual_seed(7);
    const at::Tensor expected_later = drawn_with(7);
    const auto own = std::make_shared<OwnGenerators>();
    const OwnGenerators::Scope scope(own);
    SharedDraws draws;
    for (int i = 0; i < 3; ++i) {
      at::Tensor drawn;
      run_seeded(*own, draws, 11, kHost, [&] { drawn = at::rand({4}); });
      CHECK(drawn.equal(drawn_with(11)));
      run_backward(*own, {&draws}, 12, kHost, [&] { drawn = at::rand({4}); });
      CHECK(drawn.equal(drawn_with(12)));
    }
    CHECK_THROWS_AS(run_seeded(*own, draws, 1, kHost, [] { throw std::runtime_error("boom"); }), std::runtime_error);
    // On the host, no layer draws from the default generator.
    CHECK(draws.state.load() == SharedDraws::kUnknown);
    std::thread([&] { CHECK(at::rand({4}).equal(expected_later)); }).join();
  }

  TEST_CASE("a caller is kept while a layer may draw from a card's default generator") {
    SharedDraws draws;
    CHECK(draws.possible(false));
    CHECK(draws.possible(true));
    draws.state = SharedDraws::kNotInForward;
    CHECK_FALSE(draws.possible(false));
    CHECK(draws.possible(true));
    draws.state = SharedDraws::kNever;
    CHECK_FALSE(draws.possible(true));
    draws.state = SharedDraws::kSome;
    CHECK(draws.possible(false));
  }
}

}  // namespace random_test
