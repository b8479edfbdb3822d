#include <roundpipe/runtime/call/block_sum.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "support/model.h"

using roundpipe::memory::BlockLayout;
using roundpipe::memory::BufferPool;
using roundpipe::memory::GradientBlock;
using roundpipe::memory::GradientBlockPtr;
using namespace roundpipe::runtime;
using roundpipe::runtime::support::same_bits;

namespace block_sum_test {

using Gradients = std::vector<at::Tensor>;  // one per parameter; undefined where there is none

at::Tensor uneven(at::IntArrayRef sizes, c10::ScalarType dtype, at::Generator& generator) {
  return (at::randn(sizes, generator) * at::pow(2.0, at::randint(-12, 13, sizes, generator))).to(dtype);
}

struct Case {
  std::vector<at::Tensor> parameters;
  BlockLayout layout, wide;
  at::Generator generator;
  std::mt19937 random;

  explicit Case(unsigned seed) : generator(at::detail::createCPUGenerator(seed)), random(seed) {
    // The first is larger than the part that one thread adds at a time; one parameter's strides do not follow its
    // dimensions.
    parameters = {at::empty({300, 301}, at::kBFloat16), at::empty({5, 7}).t(), at::empty({}, at::kDouble)};
    if (seed % 3 == 0) parameters.front() = at::empty({40, 3});
    for (const at::Tensor& parameter : parameters) layout.add(parameter, parameter.scalar_type());
    wide = layout.widened();
  }

  Gradients gradients() {
    Gradients made;
    for (const at::Tensor& parameter : parameters) {
      made.push_back(random() % 4 == 0 ? at::Tensor() : uneven(parameter.sizes(), parameter.scalar_type(), generator));
    }
    return made;
  }
  GradientBlockPtr block_of(const Gradients& gradients) const {
    auto block = std::make_shared<GradientBlock>();
    block->flat = at::zeros({layout.size_bytes}, at::kByte);
    for (size_t i = 0; i < gradients.size(); ++i) {
      block->received.push_back(gradients[i].defined() ? 1 : 0);
      if (gradients[i].defined()) layout.view(block->flat, i).copy_(gradients[i]);
    }
    block->landed->fire();
    return block;
  }
};

void add_into(Gradients& sums, const Gradients& terms, const BlockLayout& wide) {
  for (size_t i = 0; i < sums.size(); ++i) {
    if (!terms[i].defined()) continue;
    const at::Tensor term = terms[i].to(wide.tensors[i].dtype);
    sums[i] = sums[i].defined() ? sums[i] + term : term;
  }
}

TEST_SUITE("block sum") {
  TEST_CASE("groups in order, layers from the last to the first, then what was there; rounded once") {
    for (unsigned seed = 0; seed < 40; ++seed) {
      CAPTURE(seed);
      Case c(seed);
      const size_t layers = 1 + seed % 3;
      const int groups = 1 + static_cast<int>(seed % 5);
      std::vector<std::vector<Gradients>> made(layers);  // [layer][group]
      for (std::vector<Gradients>& of_layer : made) {
        for (int g = 0; g < groups; ++g) of_layer.push_back(c.gradients());
      }
      const Gradients before = seed % 2 == 1 ? c.gradients() : Gradients(c.parameters.size());
      const GradientBlockPtr base = seed % 2 == 1 ? c.block_of(before) : nullptr;
      Gradients expected(c.parameters.size());
      for (size_t l = layers; l-- > 0;) {
        Gradients sum(c.parameters.size());
        for (const Gradients& of_group : made[l]) add_into(sum, of_group, c.wide);
        add_into(expected, sum, c.wide);
      }
      add_into(expected, before, c.wide);

      const bool same = c.wide.same_dtypes(c.layout);
      const auto buffers = std::make_shared<BufferPool>(c.layout.size_bytes, /*pinned=*/false);
      const auto wide_buffers = same ? buffers : std::make_shared<BufferPool>(c.wide.size_bytes, /*pinned=*/false);
      const auto result = std::make_shared<GradientBlock>();
      BlockSum sums({result, base, c.layout, buffers, c.wide, wide_buffers}, layers, groups);
      roundpipe::Mutex adder;  // add_up() runs on one thread at a time
      std::vector<std::function<void()>> tasks;
      const auto send = [&](size_t layer, roundpipe::schedule::Range part) {
        Gradients sum(c.parameters.size());
        for (int g = part.first; g < part.last; ++g) add_into(sum, made[layer][static_cast<size_t>(g)], c.wide);
        std::vector<char> received;
        for (const at::Tensor& each : sum) received.push_back(each.defined() ? 1 : 0);
        at::Tensor flat;
        if (std::ranges::count(received, 1) > 0) flat = wide_buffers->take();
        for (size_t i = 0; i < sum.size(); ++i) {
          if (sum[i].defined()) c.wide.view(flat, i).copy_(sum[i]);
        }
        if (!sums.add(layer, part, flat, received)) return;
        const roundpipe::MutexLock lock(adder);
        sums.add_up();
      };
      for (size_t l = 0; l < layers; ++l) {
        // The first part may have several groups.
        const int first = 1 + static_cast<int>(c.random() % static_cast<unsigned>(groups));
        tasks.emplace_back([&send, l, first] { send(l, {0, first}); });
        for (int g = first; g < groups; ++g) tasks.emplace_back([&send, l, g] { send(l, {g, g + 1}); });
      }
      std::ranges::shuffle(tasks, c.random);
      std::vector<std::thread> threads;
      for (size_t t = 0; t < 3; ++t) {
        threads.emplace_back([&, t] {
          for (size_t i = t; i < tasks.size(); i += 3) tasks[i]();
        });
      }
      for (std::thread& thread : threads) thread.join();
      REQUIRE(result->landed->complete());
      for (size_t i = 0; i < expected.size(); ++i) {
        const at::Tensor got = roundpipe::memory::gradient(*result, c.layout, i);
        REQUIRE(got.defined() == expected[i].defined());
        if (got.defined()) CHECK(same_bits(got, expected[i].to(c.parameters[i].scalar_type())));
        // The base is unchanged, for a call that fails and goes back to it.
        if (base) CHECK(same_bits(roundpipe::memory::gradient(*base, c.layout, i), before[i]));
      }
    }
  }

  TEST_CASE("a part is added as soon as those before it are there, and nothing lands before the last") {
    BlockLayout layout;
    layout.add(at::empty({64}), at::kFloat);
    const auto buffers = std::make_shared<BufferPool>(layout.size_bytes, /*pinned=*/false);
    buffers->keep(0);
    const auto result = std::make_shared<GradientBlock>();
    const BlockLayout wide = layout.widened();
    BlockSum sums({result, nullptr, layout, buffers, wide, buffers}, 1, 4);
    const auto part = [&](double value) {
      at::Tensor flat = buffers->take();
      layout.view(flat, 0).fill_(value);
      return flat;
    };
    CHECK_FALSE(sums.add(0, {2, 3}, part(4), {1}));
    REQUIRE(sums.add(0, {0, 1}, part(1), {1}));
    CHECK_FALSE(sums.add(0, {1, 2}, part(2), {1}));  // who adds the first one takes it along
    sums.add_up();
    CHECK(buffers->host_bytes() == layout.size_bytes);
    CHECK_FALSE(result->landed->complete());
    REQUIRE(sums.add(0, {3, 4}, part(8), {1}));
    sums.add_up();
    REQUIRE(result->landed->complete());
    CHECK(same_bits(roundpipe::memory::gradient(*result, layout, 0), at::full({64}, 15.0)));
  }

  TEST_CASE("where sums can become the gradient they do, and where nothing came there is no memory") {
    BlockLayout layout;
    layout.add(at::empty({64}), at::kFloat);
    const BlockLayout wide = layout.widened();
    for (const bool any : {true, false}) {
      const auto buffers = std::make_shared<BufferPool>(layout.size_bytes, /*pinned=*/false);
      const auto result = std::make_shared<GradientBlock>();
      BlockSum sums({result, nullptr, layout, buffers, wide, buffers}, 2, 1);
      for (const size_t l : {1, 0}) {
        const at::Tensor flat = any ? buffers->take() : at::Tensor();
        if (any) layout.view(flat, 0).fill_(1);
        REQUIRE(sums.add(l, {0, 1}, flat, {static_cast<char>(any)}));
        CHECK_FALSE(result->landed->complete());
        sums.add_up();
      }
      REQUIRE(result->landed->complete());
      CHECK(result->flat.defined() == any);
      CHECK(buffers->peak_bytes() == (any ? 2 * layout.size_bytes : 0));
      if (any) CHECK(same_bits(roundpipe::memory::gradient(*result, layout, 0), at::full({64}, 2.0)));
    }
  }

  TEST_CASE("after the call has failed nothing is added") {
    BlockLayout layout;
    layout.add(at::empty({3}), at::kFloat);
    const BlockLayout wide = layout.widened();
    const auto buffers = std::make_shared<BufferPool>(layout.size_bytes, /*pinned=*/false);
    const auto result = std::make_shared<GradientBlock>();
    BlockSum sums({result, nullptr, layout, buffers, wide, buffers}, 1, 2);
    result->landed->fail(std::make_exception_ptr(std::runtime_error("call failed")));
    CHECK_FALSE(sums.add(0, {0, 1}, buffers->take(), {1}));
  }
}

}  // namespace block_sum_test
