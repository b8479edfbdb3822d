#include <roundpipe/optim/masters.h>

#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/hyperparameters.h>
#include <roundpipe/optim/parameter_update.h>
#include <roundpipe/optim/thread_pool.h>

#include "bits.h"

using namespace roundpipe::optim;

namespace {

constexpr auto kMoments = MomentFormat::kFloat32;

// The random byte of each element, once more and slowly.
uint32_t random_byte(uint64_t parameter, double step, int64_t element) {
  const kernels::RandomKey key = random_key(parameter, step);
  uint32_t x = static_cast<uint32_t>(element / 4) + key.first;
  x ^= x >> 16;
  x *= 0x7FEB352DU;
  x ^= x >> 15;
  x += key.second;
  x *= 0x846CA68BU;
  x ^= x >> 16;
  return (x >> (8 * (element % 4))) % 256;
}

// Up with the probability of what is cut off, by the obvious comparison; of the bits of a finite number.
float rounded(float value, uint32_t random) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t cut = bits % 256;
  return std::bit_cast<float>(bits - cut + (cut + random >= 256 ? 256 : 0));
}

// Weights of 24 bits as they are kept.
struct Short {
  explicit Short(const at::Tensor& values)
      : upper(unaligned(at::empty(values.numel(), at::kBFloat16)).view(values.sizes())),
        remainder(unaligned(at::empty(values.numel(), at::kChar)).view(values.sizes())) {
    const at::Tensor high = at::empty(values.sizes(), at::kBFloat16), low = at::empty(values.sizes(), at::kShort);
    ThreadPool pool(1);
    split(values, high, low, pool);
    upper.copy_(high);
    convert_remainder(low, remainder);
  }

  at::Tensor values() const {
    const at::Tensor low = at::empty(upper.sizes(), at::kShort), master = at::empty(upper.sizes());
    convert_remainder(remainder, low);
    ThreadPool pool(1);
    join(upper, low, master, pool);
    return master;
  }

  at::Tensor upper, remainder;
};

struct Rule {
  std::string name;
  Algorithm algorithm;
  Hyperparameters hyper = {};
  std::vector<int64_t> sizes = {1000};
};

std::vector<Rule> rules() {
  std::vector<Rule> rules;
  for (const int64_t count : {0, 1, 3, 255, 256, 257, 1000})
    rules.push_back({"AdamW, " + std::to_string(count), Algorithm::kAdamW, {.weight_decay = 0.1}, {count}});
  for (const Algorithm algorithm : {Algorithm::kAdam, Algorithm::kSGD, Algorithm::kAdagrad, Algorithm::kAdadelta,
                                    Algorithm::kAdamax, Algorithm::kNAdam, Algorithm::kRAdam, Algorithm::kRMSprop,
                                    Algorithm::kRprop, Algorithm::kASGD, Algorithm::kLion, Algorithm::kAdafactor}) {
    rules.push_back({std::to_string(static_cast<int>(algorithm)), algorithm, default_hyperparameters(algorithm)});
  }
  // Rows whose chunks begin anywhere, and parts on several threads.
  rules.push_back({"Adafactor", Algorithm::kAdafactor, default_hyperparameters(Algorithm::kAdafactor), {301, 519}});
  rules.push_back({"Muon", Algorithm::kMuon, default_hyperparameters(Algorithm::kMuon), {3, 33, 21}});
  return rules;
}

// One step of SGD from `before` that adds `change` to each weight.
at::Tensor stepped(const at::Tensor& before, const at::Tensor& change, uint64_t number = 0) {
  ThreadPool pool(1);
  Hyperparameters hyper;
  hyper.lr = 1;
  Short weights(before);
  ParameterState state = make_state(Algorithm::kSGD, hyper, kMoments, before);
  update(Algorithm::kSGD, hyper, kMoments, state, {weights.upper, weights.upper, weights.remainder, {}, 0, number},
         -change, {}, pool);
  return weights.values();
}

}  // namespace

TEST_CASE("masters of 24 bits: the exact step, then each element rounded by its own random byte") {
  at::manual_seed(1);
  constexpr uint64_t kNumber = (uint64_t{5} << 32) + 3;
  for (const Rule& rule : rules()) {
    CAPTURE(rule.name);
    const at::Tensor start = Short(at::randn(rule.sizes)).values();
    std::vector<at::Tensor> gradients;
    for (int step = 0; step < 4; ++step) gradients.push_back(at::randn(rule.sizes, at::kBFloat16));
    for (const std::string& set : instruction_sets()) {
      CAPTURE(set);
      set_instruction_set(set);
      for (const int threads : {1, 3}) {
        ThreadPool pool(threads);
        const at::Tensor exact = start.clone();
        Short kept(start);
        ParameterState exact_state = make_state(rule.algorithm, rule.hyper, kMoments, start);
        ParameterState state = make_state(rule.algorithm, rule.hyper, kMoments, start);
        for (size_t step = 0; step < gradients.size(); ++step) {
          update(rule.algorithm, rule.hyper, kMoments, exact_state, {exact, exact, {}, {}}, gradients[step], {0.5F, 1},
                 pool);
          update(rule.algorithm, rule.hyper, kMoments, state, {kept.upper, kept.upper, kept.remainder, {}, 0, kNumber},
                 gradients[step], {0.5F, 1}, pool);
          auto* const values = exact.mutable_data_ptr<float>();
          for (int64_t i = 0; i < exact.numel(); ++i)
            values[i] = rounded(values[i], random_byte(kNumber, static_cast<double>(step), i));
          REQUIRE(different_bits(kept.values(), exact) == 0);
        }
        for (size_t i = 0; i < state.tensors.size(); ++i)
          CHECK(different_bits(state.tensors[i], exact_state.tensors[i]) == 0);
      }
    }
  }
}

TEST_CASE("masters of 24 bits: 8-bit moments, any threads and any parts have the bits of the whole") {
  at::manual_seed(2);
  const int64_t count = 3 * 65536 + 77;
  const at::Tensor start = at::randn({count});
  const at::Tensor gradient = at::randn({count}, at::kBFloat16);
  constexpr auto kEightBit = MomentFormat::kBlockwise8Bit;
  const auto run = [&](int threads, const std::vector<int64_t>& ends) {
    ThreadPool pool(threads);
    Short weights(start);
    int64_t first = 0;
    for (const int64_t end : ends) {
      const auto part = [&](const at::Tensor& whole) { return whole.narrow(0, first, end - first); };
      ParameterState state = make_state(Algorithm::kAdamW, {}, kEightBit, part(start));
      for (int step = 0; step < 3; ++step) {
        update(Algorithm::kAdamW, {}, kEightBit, state,
               {part(weights.upper), part(weights.upper), part(weights.remainder), {}, first, 7}, part(gradient), {},
               pool);
      }
      first = end;
    }
    return weights.values();
  };
  const at::Tensor whole = run(1, {count});
  CHECK(different_bits(run(3, {count}), whole) == 0);
  CHECK(different_bits(run(2, {65536, 3 * 65536, count}), whole) == 0);
}

TEST_CASE("masters of 24 bits: rounding has the exact value as its mean, for every byte of the random words") {
  constexpr int64_t kCount = 65536;
  // At 1, a weight of 24 bits has steps of 2^-15, in which the sums below end at these 256ths.
  const double step = std::ldexp(1, -15);
  for (const int part : {0, 1, 26, 128, 201, 255}) {
    for (const double sign : {1.0, -1.0}) {
      CAPTURE(part);
      const double change = sign * step * part / 256;
      const at::Tensor after = stepped(at::full({kCount}, sign), at::full({kCount}, change));
      const at::Tensor moved = (after.to(at::kDouble) - sign) / (sign * step);
      CHECK((moved.eq(0) | moved.eq(1)).all().item<bool>());
      const double p = part / 256.0;
      // Five standard deviations: this seed's numbers are always the same.
      const double tolerance = 5 * std::sqrt(p * (1 - p) / (kCount / 4.0));
      for (int64_t place = 0; place < 4; ++place)
        CHECK(std::abs(moved.slice(0, place, kCount, 4).mean().item<double>() - p) <= tolerance);
    }
  }
}

TEST_CASE("masters of 24 bits: changes far below their last bit are not lost") {
  constexpr int64_t kCount = 4096;
  constexpr int kSteps = 1000;
  const double change = std::ldexp(1, -21);  // a 64th of the last bit at 1
  ThreadPool pool(1);
  Hyperparameters hyper;
  hyper.lr = 1;
  Short weights(at::ones({kCount}));
  ParameterState state = make_state(Algorithm::kSGD, hyper, kMoments, at::ones({kCount}));
  const at::Tensor gradient = at::full({kCount}, -change).to(at::kBFloat16);
  for (int step = 0; step < kSteps; ++step) {
    update(Algorithm::kSGD, hyper, kMoments, state, {weights.upper, weights.upper, weights.remainder, {}}, gradient, {},
           pool);
  }
  const at::Tensor moved = weights.values().to(at::kDouble) - 1;
  const double last_bit = std::ldexp(1, -15), p = 1.0 / 64;
  const double deviation = last_bit * std::sqrt(kSteps * p * (1 - p));
  CHECK(std::abs(moved.mean().item<double>() - kSteps * change) < 5 * deviation / std::sqrt(kCount));
  // Elements differ from each other as independent ones do, so their errors do not add up in a layer.
  CHECK(moved.std().item<double>() == doctest::Approx(deviation).epsilon(0.1));
}

TEST_CASE("masters of 24 bits: other parameters and other steps round otherwise") {
  const at::Tensor before = at::ones({4096}), change = at::full({4096}, std::ldexp(1, -16));
  const at::Tensor first = stepped(before, change, 1);
  CHECK(different_bits(first, stepped(before, change, 1)) == 0);
  // Half of them, as of independent ones.
  CHECK(different_bits(first, stepped(before, change, 2)) > 1700);
  CHECK(different_bits(first, stepped(before, change, uint64_t{1} << 32)) > 1700);
  CHECK(random_key(1, 0).first != random_key(1, 1).first);
}

TEST_CASE("masters of 24 bits: what is representable stays, and what is not finite stays that") {
  const at::Tensor values = at::tensor({0.0F, 1.0F, -1.5F, 1e-40F, INFINITY, -INFINITY, NAN});
  const at::Tensor kept = Short(values).values();
  for (const std::string& set : instruction_sets()) {
    set_instruction_set(set);
    const at::Tensor after = stepped(kept, at::zeros({7}));
    CHECK(different_bits(after.narrow(0, 0, 6), kept.narrow(0, 0, 6)) == 0);
    CHECK(after[6].isnan().item<bool>());
    CHECK(stepped(at::ones({300}), at::full({300}, NAN)).isnan().all().item<bool>());
  }
}

TEST_CASE("remainders: of one format from the other, to the nearest that keeps the weight") {
  const at::Tensor exact = at::arange(-32768, 32768, at::kInt).to(at::kShort);
  const at::Tensor narrow = at::empty({65536}, at::kChar), wide = at::empty({65536}, at::kShort);
  convert_remainder(exact, narrow);
  convert_remainder(narrow, wide);
  const at::Tensor error = (wide.to(at::kInt) - exact.to(at::kInt)).abs();
  CHECK(error.narrow(0, 0, 65536 - 128).max().item<int>() == 128);
  CHECK(error.max().item<int>() == 255);  // the last ones, which would belong to the next weight
  const at::Tensor again = at::empty({65536}, at::kChar), same = at::empty({65536}, at::kShort);
  convert_remainder(wide, again);
  CHECK(at::equal(again, narrow));
  convert_remainder(exact, same);
  CHECK(at::equal(same, exact));
}

TEST_CASE("masters: what takes them, in bytes a weight, and what cannot have them") {
  constexpr auto k24Bit = MasterFormat::k24Bit, kExact = MasterFormat::kFloat32;
  CHECK(remainder_dtype(at::kBFloat16, kExact) == at::kShort);
  CHECK(remainder_dtype(at::kBFloat16, k24Bit) == at::kChar);
  CHECK(remainder_dtype(at::kHalf, kExact) == at::kFloat);
  CHECK_FALSE(remainder_dtype(at::kFloat, kExact).has_value());
  CHECK_NOTHROW(check_masters(k24Bit, at::kBFloat16, "w"));
  for (const at::ScalarType other : {at::kHalf, at::kFloat}) {
    CHECK_NOTHROW(check_masters(kExact, other, "w"));
    CHECK_THROWS_WITH_AS(check_masters(k24Bit, other, "layer.w"), doctest::Contains("'layer.w' is"),
                         std::invalid_argument);
  }
  // 2 bytes less than with exact masters, which are read and written.
  CHECK(update_traffic(Algorithm::kAdamW, {}, {kMoments, k24Bit}, at::kBFloat16) == 24.0 / 2);
}
