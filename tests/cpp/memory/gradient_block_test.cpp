#include <roundpipe/memory/gradient_block.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

using namespace roundpipe::memory;

namespace {

BlockLayout layout_of(const std::vector<at::Tensor>& tensors) {
  BlockLayout layout;
  for (const at::Tensor& tensor : tensors) layout.add(tensor, tensor.scalar_type());
  return layout;
}

// Magnitudes from 2^-12 to 2^12, so that any other order of summation gives other bits.
at::Tensor uneven(at::IntArrayRef sizes, c10::ScalarType dtype, at::Generator& generator) {
  return (at::randn(sizes, generator) * at::pow(2.0, at::randint(-12, 13, sizes, generator))).to(dtype);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous();
  const at::Tensor y = b.contiguous();
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
         std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

// One gradient per parameter; undefined where there is none.
using Gradients = std::vector<at::Tensor>;

std::pair<at::Tensor, std::vector<char>> packed(const BlockLayout& layout, const Gradients& gradients) {
  const at::Tensor flat = at::empty({layout.size_bytes}, at::kByte).fill_(0xFF);
  std::vector<char> received;
  for (size_t i = 0; i < gradients.size(); ++i) {
    received.push_back(gradients[i].defined() ? 1 : 0);
    if (gradients[i].defined()) layout.view(flat, i).copy_(gradients[i]);
  }
  return {flat, received};
}

void add_into(Gradients& sums, const Gradients& terms) {
  for (size_t i = 0; i < sums.size(); ++i) {
    if (!terms[i].defined()) continue;
    sums[i] = sums[i].defined() ? sums[i] + terms[i] : terms[i];
  }
}

void check_equal(const GradientBlock& block, const BlockLayout& layout, const Gradients& expected) {
  REQUIRE(block.landed->complete());
  for (size_t i = 0; i < expected.size(); ++i) {
    CAPTURE(i);
    const at::Tensor got = gradient(block, layout, i);
    REQUIRE(got.defined() == expected[i].defined());
    if (got.defined()) CHECK(same_bits(got, expected[i]));
  }
}

struct Case {
  std::vector<at::Tensor> parameters;
  BlockLayout layout;
  at::Generator generator;
  std::mt19937 random;

  explicit Case(unsigned seed) : generator(at::detail::createCPUGenerator(seed)), random(seed) {
    parameters = {at::empty({5, 7}).t(), at::empty({33}, at::kBFloat16), at::empty({}, at::kDouble),
                  at::empty({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast)};
    layout = layout_of(parameters);
  }

  // Some parameters get no gradient, as in layers that do not use all of theirs.
  Gradients gradients() {
    Gradients made;
    for (const at::Tensor& parameter : parameters) {
      made.push_back(random() % 4 == 0 ? at::Tensor() : uneven(parameter.sizes(), parameter.scalar_type(), generator));
    }
    return made;
  }
};

// Runs the tasks on `threads` threads, in a random order.
template <typename Task>
void run_shuffled(std::vector<Task> tasks, std::mt19937& random, size_t threads) {
  std::shuffle(tasks.begin(), tasks.end(), random);
  std::vector<std::thread> workers;
  for (size_t t = 0; t < threads; ++t) {
    workers.emplace_back([&tasks, t, threads] {
      for (size_t i = t; i < tasks.size(); i += threads) tasks[i]();
    });
  }
  for (std::thread& worker : workers) worker.join();
}

std::shared_ptr<BufferPool> buffers_of(const BlockLayout& layout) {
  return std::make_shared<BufferPool>(layout.size_bytes, /*pinned=*/false);
}

}  // namespace

TEST_CASE("gradient: undefined where nothing was received") {
  const BlockLayout layout = layout_of({at::empty({3}), at::empty({2})});
  GradientBlock block;
  CHECK_FALSE(gradient(block, layout, 0).defined());
  std::tie(block.flat, block.received) = packed(layout, {at::ones({3}), at::Tensor()});
  CHECK(at::equal(gradient(block, layout, 0), at::ones({3})));
  CHECK_FALSE(gradient(block, layout, 1).defined());
}

TEST_CASE(
    "tied sum: within a microbatch from the last layer to the first, then microbatches and groups in order, in fp32") {
  for (unsigned seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    Case c(100 + seed);
    const size_t layers = 1 + seed % 3;
    const size_t microbatches = 1 + seed % 5;
    std::vector<std::vector<Gradients>> made(microbatches);  // [microbatch][layer]
    for (auto& microbatch : made) {
      for (size_t layer = 0; layer < layers; ++layer) microbatch.push_back(c.gradients());
    }
    GradientBlockPtr base;
    Gradients expected(c.parameters.size());
    if (seed % 2 == 1) {
      base = std::make_shared<GradientBlock>();
      expected = c.gradients();
      std::tie(base->flat, base->received) = packed(c.layout, expected);
      base->landed->fire();
    }
    const Gradients before = expected;
    std::vector<size_t> ends;
    for (size_t m = 1; m <= microbatches; ++m) {
      if (m == microbatches || c.random() % 2 == 0) ends.push_back(m);
    }
    const auto cast = [&](Gradients& gradients, bool wide) {
      for (size_t i = 0; i < gradients.size(); ++i) {
        const c10::ScalarType dtype = c.parameters[i].scalar_type();
        if (gradients[i].defined()) gradients[i] = gradients[i].to(wide && dtype == at::kBFloat16 ? at::kFloat : dtype);
      }
    };
    cast(expected, /*wide=*/true);
    size_t next = 0;
    for (const size_t end : ends) {
      Gradients group(c.parameters.size());
      for (Gradients& sum = next == 0 ? expected : group; next < end; ++next) {
        Gradients folded(c.parameters.size());
        for (size_t layer = layers; layer-- > 0;) add_into(folded, made[next][layer]);
        cast(folded, /*wide=*/true);
        add_into(sum, folded);
      }
      add_into(expected, group);
    }
    cast(expected, /*wide=*/false);

    const auto result = std::make_shared<GradientBlock>();
    TiedSum sum(result, base, c.layout, buffers_of(c.layout), layers, ends);
    std::vector<std::function<void()>> tasks;
    for (size_t m = 0; m < microbatches; ++m) {
      for (size_t layer = 0; layer < layers; ++layer) {
        tasks.emplace_back([&, m, layer] { sum.contribute(layer, m, made[m][layer]); });
      }
    }
    run_shuffled(tasks, c.random, 3);
    check_equal(*result, c.layout, expected);
    // The sum of earlier calls is unchanged, for a call that fails and goes back to it.
    if (base) check_equal(*base, c.layout, before);
  }
}

TEST_CASE("tied sum: contributions are not changed, and a base that received nothing counts as none") {
  const BlockLayout layout = layout_of({at::empty({3})});
  const auto result = std::make_shared<GradientBlock>();
  TiedSum sum(result, std::make_shared<GradientBlock>(), layout, buffers_of(layout), 2, {1});
  const at::Tensor first = at::full({3}, 1.0);
  const at::Tensor second = at::full({3}, 2.0);
  sum.contribute(0, 0, {first});
  CHECK_FALSE(result->landed->complete());
  sum.contribute(1, 0, {second});
  CHECK(at::equal(gradient(*result, layout, 0), at::full({3}, 3.0)));
  CHECK(at::equal(first, at::full({3}, 1.0)));
  CHECK(at::equal(second, at::full({3}, 2.0)));
}

TEST_CASE("tied sum: 16-bit gradients of microbatches are summed in fp32 and rounded once") {
  // In bf16, 256 + 1 = 256.
  const auto bf16 = [](double value) { return at::full({3}, value, at::kBFloat16); };
  const BlockLayout layout = layout_of({bf16(0)});
  const auto base = std::make_shared<GradientBlock>();
  std::tie(base->flat, base->received) = packed(layout, {bf16(256)});
  base->landed->fire();
  const auto result = std::make_shared<GradientBlock>();
  TiedSum sum(result, base, layout, buffers_of(layout), 1, {2});
  for (size_t microbatch : {0, 1}) sum.contribute(0, microbatch, {bf16(1)});
  CHECK(at::equal(gradient(*result, layout, 0), bf16(258)));
}

TEST_CASE("tied sum: after the call has failed, contributions are ignored") {
  const BlockLayout layout = layout_of({at::empty({3})});
  const auto result = std::make_shared<GradientBlock>();
  TiedSum sum(result, nullptr, layout, buffers_of(layout), 1, {1});
  result->landed->fail(std::make_exception_ptr(std::runtime_error("call failed")));
  sum.contribute(0, 0, {at::ones({3})});
  CHECK_FALSE(result->flat.defined());
  CHECK_THROWS_WITH_AS(result->landed->wait(), "call failed", std::runtime_error);
}
