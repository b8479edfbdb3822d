#include <roundpipe/optim/block_optimizer.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/optim/thread_pool.h>

using namespace roundpipe::optim;
using roundpipe::memory::GradientBlock;
using roundpipe::memory::ParameterBlock;

namespace {

Hyperparameters hyper_of(double lr) {
  Hyperparameters hyper;
  hyper.lr = lr;
  hyper.weight_decay = 0.01;
  return hyper;
}

void make_masters(BlockOptimizer& optimizer) {
  optimizer.prepare_masters();
  optimizer.take_masters();
}

// A block's gradients, undefined where there is none.
GradientBlock gradients_of(const ParameterBlock& block, const std::vector<at::Tensor>& values) {
  GradientBlock gradients;
  gradients.flat = block.buffers()->take();
  for (size_t i = 0; i < values.size(); ++i) {
    gradients.received.push_back(values[i].defined());
    if (values[i].defined()) block.layout().view(gradients.flat, i).copy_(values[i]);
  }
  return gradients;
}

}  // namespace

TEST_CASE("block optimizer: each parameter by its group, written over the gradients, others as they were") {
  at::manual_seed(1);
  ThreadPool pool(2);
  const std::vector<at::Tensor> start = {
      at::randn({16, 8}), at::randn({8, 16}).t(),       at::randn({5}).to(at::kBFloat16),
      at::randn({7}),     at::randn({6}).to(at::kHalf), at::arange(4)};
  std::vector<roundpipe::memory::NamedTensor> named;
  for (const at::Tensor& value : start) named.push_back({"p", value.clone()});
  ParameterBlock block(named, /*pinned=*/false);
  Remainders rest;
  // The fourth is frozen, the last an integer.
  BlockOptimizer optimizer(block, {0, 1, 0, -1, 1, -1}, rest, Algorithm::kAdamW, MomentFormat::kFloat32);
  make_masters(optimizer);
  CHECK(optimizer.trains_any());
  const std::vector<Hyperparameters> groups = {hyper_of(0.1), hyper_of(0.01)};

  std::vector<at::Tensor> expected;
  std::vector<ParameterState> states(start.size());
  std::vector<at::Tensor> masters;
  for (const at::Tensor& value : start) masters.push_back(value.to(at::kFloat));
  at::Tensor before = block.current()->flat;
  for (int step = 0; step < 3; ++step) {
    std::vector<at::Tensor> values;
    for (const at::Tensor& value : start) values.push_back(at::randn(value.sizes()).to(value.scalar_type()));
    if (step == 1) values[1].reset();  // no gradient in this step
    const GradientBlock gradients = gradients_of(block, values);
    for (size_t i : {0, 1, 2, 4}) {
      if (!values[i].defined()) continue;
      const Hyperparameters& hyper = groups[i == 0 || i == 2 ? 0 : 1];
      at::Tensor like = at::empty_strided(start[i].sizes(), start[i].strides());
      like.copy_(masters[i]);
      at::Tensor gradient = at::empty_like(like).copy_(values[i]);
      if (states[i].tensors.empty()) states[i] = make_state(Algorithm::kAdamW, hyper, MomentFormat::kFloat32, like);
      update(Algorithm::kAdamW, hyper, MomentFormat::kFloat32, states[i], {like, like, {}, {}}, gradient, {0.5F, 0.25F},
             pool);
      masters[i] = like;
    }
    optimizer.update(before, gradients.flat, gradients, block.layout(), groups, {0.5F, 0.25F}, pool);
    before = gradients.flat;
  }
  const auto weight = [&](size_t i) { return block.layout().view(before, i); };
  CHECK(at::equal(weight(0), masters[0]));
  CHECK(at::equal(weight(1), masters[1]));
  at::Tensor joined = at::empty({5});
  join(weight(2), rest.tensors[2], joined, pool);
  CHECK(at::equal(joined, masters[2]));
  CHECK(at::equal(weight(3), start[3]));
  CHECK(at::equal(rest.tensors[4], masters[4]));
  CHECK(at::equal(weight(4), masters[4].to(at::kHalf)));
  CHECK(at::equal(weight(5), start[5]));
  CHECK(optimizer.moment_bytes(groups) == 8 * (128 + 128 + 5 + 6));
  CHECK(optimizer.remainder_bytes() == 2 * 5 + 4 * 6);
}

TEST_CASE("block optimizer: the norm counts what is trained, and a new master starts from the weights") {
  ThreadPool pool(1);
  ParameterBlock block({{"a", at::ones({3}).to(at::kBFloat16)}, {"b", at::ones({2})}}, false);
  Remainders rest;
  BlockOptimizer optimizer(block, {0, -1}, rest, Algorithm::kSGD, MomentFormat::kFloat32);
  make_masters(optimizer);
  const GradientBlock gradients = gradients_of(block, {at::full({3}, 2.0), at::full({2}, 100.0)});
  CHECK(optimizer.total(optimizer.sums_of_squares(gradients, block.layout(), 0.5F, pool)) == doctest::Approx(3.0));
  rest.tensors[0].fill_(9);
  // Another optimizer takes over: the masters stay the model's.
  BlockOptimizer second(block, {0, -1}, rest, Algorithm::kSGD, MomentFormat::kFloat32);
  make_masters(second);
  CHECK(second.remainder(0)[0].item<int>() == 9);
  second.note_written(0);
  second.restart_masters(block.current()->flat);
  CHECK(second.remainder(0).count_nonzero().item<int64_t>() == 0);
}

TEST_CASE("block optimizer: a type that cannot be trained is refused by name") {
  ParameterBlock block({{"wide", at::ones({3}, at::kDouble)}}, false);
  Remainders rest;
  std::string message;
  try {
    BlockOptimizer(block, {0}, rest, Algorithm::kSGD, MomentFormat::kFloat32);
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CHECK(message.find("'wide' is Double, expected float32, bfloat16 or float16") != std::string::npos);
}

TEST_CASE("block optimizer: rules of whole parameters refuse to share one with other nodes") {
  const at::Tensor matrix = at::randn({16, 8});
  ParameterBlock block({{"p", matrix}}, /*pinned=*/false);
  for (const auto& [algorithm, said] :
       {std::pair{Algorithm::kMuon, "[optim] Muon is not for several nodes"},
        std::pair{Algorithm::kAdafactor, "[optim] Adafactor is not for several nodes"}}) {
    Remainders rest;
    CHECK_THROWS_WITH_AS(BlockOptimizer(block, {0}, rest, algorithm, MomentFormat::kFloat32, {{0, 128}}),
                         doctest::Contains(said), std::invalid_argument);
    CHECK_NOTHROW(BlockOptimizer(block, {0}, rest, algorithm, MomentFormat::kFloat32));
  }
}

TEST_CASE("block optimizer: masters of 24 bits, made from exact ones and back") {
  ThreadPool pool(1);
  const at::Tensor values = at::tensor({1.0F, -2.0F, 0.5F}).to(at::kBFloat16);
  ParameterBlock block({{"a", values.clone()}, {"b", values.clone()}}, /*pinned=*/false);
  Remainders rest;
  constexpr auto kMoments = MomentFormat::kFloat32;
  BlockOptimizer exact(block, {0, 0}, rest, Algorithm::kSGD, kMoments);
  make_masters(exact);
  rest.tensors[0].copy_(at::tensor({300, -300, 32767}, at::kShort));
  BlockOptimizer narrow(block, {0, 0}, rest, Algorithm::kSGD, {kMoments, MasterFormat::k24Bit}, {}, 9);
  make_masters(narrow);
  CHECK(narrow.remainder_bytes() == 2 * 3);
  CHECK(at::equal(rest.tensors[0], at::tensor({1, -1, 127}, at::kChar)));
  CHECK(at::equal(rest.tensors[1], at::zeros({3}, at::kChar)));

  // Each parameter rounds by numbers of its own, those that the block's number and its index make.
  const at::Tensor change = at::full({3}, std::ldexp(1, -18)).to(at::kBFloat16);
  Hyperparameters hyper = hyper_of(1);
  for (const size_t i : {0, 1}) {
    at::Tensor weights = values.clone(), remainder = rest.tensors[i].clone();
    ParameterState state = make_state(Algorithm::kSGD, hyper, kMoments, weights);
    for (int step = 0; step < 2; ++step)
      update(Algorithm::kSGD, hyper, kMoments, state, {weights, weights, remainder, {}, 0, (uint64_t{9} << 32) + i},
             change, {}, pool);
    at::Tensor before = block.current()->flat;
    Remainders own{{rest.tensors[0].clone(), rest.tensors[1].clone()}, nullptr};
    BlockOptimizer alone(block, {0, 0}, own, Algorithm::kSGD, {kMoments, MasterFormat::k24Bit}, {}, 9);
    for (int step = 0; step < 2; ++step) {
      const GradientBlock gradients = gradients_of(block, {change, change});
      alone.update(before, gradients.flat, gradients, block.layout(), {hyper}, {}, pool);
      before = gradients.flat;
    }
    CHECK(at::equal(own.tensors[i], remainder));
    CHECK(at::equal(block.layout().view(before, i), weights));
  }

  BlockOptimizer back(block, {0, 0}, rest, Algorithm::kSGD, kMoments);
  make_masters(back);
  CHECK(at::equal(rest.tensors[0], at::tensor({256, -256, 127 * 256}, at::kShort)));

  ParameterBlock others({{"wide", at::ones({3})}}, /*pinned=*/false);
  Remainders none;
  CHECK_THROWS_WITH_AS(BlockOptimizer(others, {0}, none, Algorithm::kSGD, {kMoments, MasterFormat::k24Bit}),
                       doctest::Contains("'wide' is Float, expected bfloat16"), std::invalid_argument);
}
