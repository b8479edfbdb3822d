#include <roundpipe/memory/parameter_block.h>

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/memory/mapped_file.h>

using namespace roundpipe::memory;
using roundpipe::device::EventPtr;
using roundpipe::device::make_event;
using Reads = ParameterBlock::Reads;

namespace {

ParameterBlock block_of(const std::vector<at::Tensor>& tensors) {
  std::vector<NamedTensor> named;
  for (size_t i = 0; i < tensors.size(); ++i) named.push_back({roundpipe::concat("p", i), tensors[i]});
  return {named, /*pinned=*/false};
}

std::vector<at::Tensor> read_values(const ParameterBlock& block, const WeightVersionPtr& reading) {
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < block.layout().tensors.size(); ++i) {
    values.push_back(block.layout().view(reading->flat, i).clone());
  }
  return values;
}

}  // namespace

TEST_CASE("block: keeps values, strides and identity of the parameters, which become views of it") {
  at::Tensor weight = at::randn({4, 6}).t();
  weight.set_requires_grad(true);
  const at::Tensor bias = at::randn({4}, at::kDouble);
  const at::Tensor weight_before = weight.detach().clone();
  const at::Tensor bias_before = bias.clone();
  const ParameterBlock block = block_of({weight, bias});
  CHECK(at::equal(weight, weight_before));
  CHECK(at::equal(bias, bias_before));
  CHECK(weight.strides() == at::IntArrayRef({1, 6}));
  CHECK(weight.requires_grad());
  CHECK(weight.is_leaf());
  const WeightVersionPtr reading = block.current();
  CHECK(reading->published->complete());
  CHECK(weight.storage().is_alias_of(reading->flat.storage()));
  CHECK(bias.storage().is_alias_of(reading->flat.storage()));
  CHECK(block.buffers()->host_bytes() == block.layout().size_bytes);
  {
    const at::NoGradGuard no_grad;
    weight.add_(1);
  }
  CHECK(at::equal(read_values(block, reading)[0], weight_before + 1));
}

TEST_CASE("block: publishing out of place leaves the old version readable until its successor's successor") {
  const at::Tensor parameter = at::zeros({8});
  ParameterBlock block = block_of({parameter});
  const WeightVersionPtr version0 = block.current();
  ParameterBlock::Update first = block.begin_update(Reads::kAfterAndGraphs);
  const WeightVersionPtr version1 = block.current();
  CHECK_FALSE(version1->published->complete());
  CHECK_FALSE(version0->retired);

  block.copy_in(first, {at::ones({8})});
  CHECK(version1->published->complete());
  CHECK(version1->flat.data_ptr() != version0->flat.data_ptr());
  CHECK(at::equal(read_values(block, version0)[0], at::zeros({8})));
  CHECK(at::equal(read_values(block, version1)[0], at::ones({8})));
  CHECK(block.buffers()->host_bytes() == 2 * block.layout().size_bytes);

  CHECK(at::equal(parameter, at::zeros({8})));
  block.repoint();
  CHECK(at::equal(parameter, at::ones({8})));

  ParameterBlock::Update second = block.begin_update(Reads::kAfterAndGraphs);
  CHECK(version0->retired);
  CHECK_FALSE(version1->retired);
  block.copy_in(second, {at::full({8}, 2.0)});
  CHECK(at::equal(read_values(block, version1)[0], at::ones({8})));
  CHECK(at::equal(read_values(block, block.current())[0], at::full({8}, 2.0)));
}

TEST_CASE("block: publishing in place keeps one buffer and ends the old version") {
  const at::Tensor parameter = at::zeros({8});
  ParameterBlock block = block_of({parameter});
  const WeightVersionPtr version0 = block.current();
  ParameterBlock::Update first = block.begin_update(Reads::kAfter);
  CHECK(version0->retired);
  CHECK_FALSE(block.current()->published->complete());
  block.copy_in(first, {at::ones({8}, at::kDouble)});
  CHECK(block.current()->published->complete());
  CHECK(block.buffers()->host_bytes() == block.layout().size_bytes);
  CHECK(at::equal(parameter, at::ones({8})));
}

TEST_CASE("block: publishing waits for the last upload from the place it overwrites, failed uploads included") {
  for (const bool in_place : {true, false}) {
    CAPTURE(in_place);
    const at::Tensor parameter = at::zeros({4});
    ParameterBlock block = block_of({parameter});
    if (!in_place) {  // the buffer that version 2 overwrites is version 0's
      const WeightVersionPtr version0 = block.current();
      ParameterBlock::Update first = block.begin_update(Reads::kAfterAndGraphs);
      block.copy_in(first, {at::ones({4})});
      const EventPtr uploaded = make_event();
      block.add_reader(version0, uploaded);
      ParameterBlock::Update second = block.begin_update(Reads::kAfterAndGraphs);
      std::thread optimizer([&] { block.copy_in(second, {at::full({4}, 2.0)}); });
      CHECK_FALSE(block.current()->published->wait_for(30));
      CHECK(at::equal(read_values(block, version0)[0], at::zeros({4})));
      uploaded->fail(std::make_exception_ptr(std::runtime_error("upload failed")));
      optimizer.join();
      CHECK(block.current()->published->complete());
      continue;
    }
    const WeightVersionPtr version0 = block.current();
    const EventPtr first = make_event();
    const EventPtr second = make_event();
    block.add_reader(version0, first);
    block.add_reader(version0, second);
    ParameterBlock::Update update = block.begin_update(Reads::kAfter);
    std::thread optimizer([&] { block.copy_in(update, {at::ones({4})}); });
    first->fire();
    CHECK_FALSE(block.current()->published->wait_for(30));
    CHECK(at::equal(read_values(block, version0)[0], at::zeros({4})));
    second->fire();
    optimizer.join();
    CHECK(at::equal(read_values(block, block.current())[0], at::ones({4})));
  }
}

TEST_CASE("block: uploads of the version in use do not hold up the next one") {
  ParameterBlock block = block_of({at::zeros({4})});
  const EventPtr never = make_event();
  block.add_reader(block.current(), never);
  ParameterBlock::Update first = block.begin_update(Reads::kAfterAndGraphs);
  block.copy_in(first, {at::ones({4})});
  CHECK(block.current()->published->complete());
}

TEST_CASE("block: many asynchronous steps with uploads on other threads never mix versions") {
  constexpr int kSteps = 200;
  constexpr int64_t kCount = 512;
  ParameterBlock block = block_of({at::zeros({kCount}), at::zeros({kCount}, at::kBFloat16)});
  std::mt19937 random(11);
  std::vector<std::thread> threads;
  std::thread optimizer;
  for (int step = 0; step < kSteps; ++step) {
    // Uploads of this step, each on a thread of its own, read version `step`.
    for (int upload = 0; upload < 2; ++upload) {
      const WeightVersionPtr reading = block.current();
      const EventPtr uploaded = make_event();
      block.add_reader(reading, uploaded);
      threads.emplace_back([&block, reading, uploaded, step] {
        reading->published->wait();
        for (const at::Tensor& value : read_values(block, reading)) {
          CHECK(at::equal(value, at::full_like(value, step % 128)));
        }
        uploaded->fire();
      });
    }
    // One publication runs at a time, as with an optimizer thread.
    if (optimizer.joinable()) optimizer.join();
    ParameterBlock::Update update = block.begin_update(random() % 3 == 0 ? Reads::kAfter : Reads::kAfterAndGraphs);
    optimizer = std::thread([&block, update, step]() mutable {
      const at::Tensor value = at::full({kCount}, (step + 1) % 128);
      block.copy_in(update, {value, value});
    });
    if (threads.size() > 8) {
      for (std::thread& thread : threads) thread.join();
      threads.clear();
    }
  }
  optimizer.join();
  for (std::thread& thread : threads) thread.join();
}

TEST_CASE("block: parameters whose storage the user replaced come back with the user's values") {
  at::Tensor replaced = at::zeros({2, 3});
  const at::Tensor kept = at::ones({4});
  ParameterBlock block = block_of({replaced, kept});
  replaced.set_data(at::full({3, 2}, 7.0).t());
  CHECK_FALSE(replaced.storage().is_alias_of(block.current()->flat.storage()));
  ParameterBlock::adopt_replaced({&block});
  CHECK(replaced.storage().is_alias_of(block.current()->flat.storage()));
  CHECK(at::equal(replaced, at::full({2, 3}, 7.0)));
  CHECK(at::equal(read_values(block, block.current())[0], at::full({2, 3}, 7.0)));
  CHECK(at::equal(kept, at::ones({4})));
}

TEST_CASE("block: parameters that have changed places, or lie in their own memory in another order") {
  const at::Tensor first = at::arange(4, at::kFloat).view({2, 2}), second = at::full({2, 2}, 9.0);
  at::Tensor a = first.clone(), b = second.clone();
  ParameterBlock block = block_of({a, b});
  const at::Tensor of_a = a.detach();
  a.set_data(b.detach());
  b.set_data(of_a);
  ParameterBlock::adopt_replaced({&block});
  CHECK(at::equal(read_values(block, block.current())[0], second));
  CHECK(at::equal(read_values(block, block.current())[1], first));
  b.set_data(b.detach().t());
  ParameterBlock::adopt_replaced({&block});
  CHECK(at::equal(read_values(block, block.current())[1], first.t()));
  CHECK(at::equal(b, first.t()));
}

TEST_CASE("block: a parameter without values, as another block hides them, is refused by name") {
  at::Tensor parameter = at::ones({3});
  ParameterBlock block = block_of({parameter});
  ParameterBlock other = block_of({parameter});
  const ParameterBlock::Update update = other.begin_update(ParameterBlock::Reads::kAfter);
  other.repoint();
  CHECK_THROWS_WITH_AS(ParameterBlock::adopt_replaced({&block}),
                       doctest::Contains("'p0' has been assigned that of a model whose step is under way"),
                       std::invalid_argument);
  update.after->flat = other.buffers()->take();
  other.layout().view(update.after->flat, 0).fill_(2);
  update.after->published->fire();
  other.repoint();
  ParameterBlock::adopt_replaced({&block});
  CHECK(at::equal(parameter, at::full({3}, 2.0)));
}

TEST_CASE("block: the newest weights are shown while calls read those before, and what is written there stays") {
  at::Tensor parameter = at::ones({3});
  ParameterBlock block = block_of({parameter});
  const ParameterBlock::Update update = block.begin_update(ParameterBlock::Reads::kBefore);
  block.repoint();
  CHECK(at::equal(parameter, at::ones({3})));
  block.show_newest();  // is not there yet
  CHECK_FALSE(block.shows_newest());
  update.after->flat = block.buffers()->take();
  block.layout().view(update.after->flat, 0).fill_(2);
  update.after->published->fire();
  block.show_newest();
  CHECK(block.shows_newest());
  CHECK(at::equal(parameter, at::full({3}, 2.0)));
  CHECK(at::equal(read_values(block, block.current())[0], at::ones({3})));
  parameter.fill_(3);
  ParameterBlock::adopt_replaced({&block});
  block.settle();
  block.repoint();
  CHECK(at::equal(parameter, at::full({3}, 3.0)));
}

TEST_CASE("block: what is assigned while calls read the weights before the newest ones is in both") {
  at::Tensor parameter = at::ones({3});
  ParameterBlock block = block_of({parameter});
  const ParameterBlock::Update update = block.begin_update(ParameterBlock::Reads::kBefore);
  update.after->flat = block.buffers()->take();
  block.layout().view(update.after->flat, 0).fill_(2);
  update.after->published->fire();
  parameter.set_data(at::full({3}, 5.0));
  ParameterBlock::adopt_replaced({&block});
  CHECK(block.newest_has(0));
  CHECK(at::equal(read_values(block, block.current())[0], at::full({3}, 5.0)));
  parameter.fill_(6);  // in place: of the weights that calls read alone
  CHECK_FALSE(block.newest_has(0));
  block.settle();
  block.repoint();
  CHECK(at::equal(parameter, at::full({3}, 5.0)));
}

TEST_CASE("block: parameters of two blocks that have changed places in the newest weights") {
  at::Tensor a = at::ones({3}), b = at::ones({3});
  ParameterBlock first = block_of({a}), second = block_of({b});
  double value = 2;
  for (ParameterBlock* const block : {&first, &second}) {
    const ParameterBlock::Update update = block->begin_update(ParameterBlock::Reads::kBefore);
    update.after->flat = block->buffers()->take();
    block->layout().view(update.after->flat, 0).fill_(value++);
    update.after->published->fire();
    block->show_newest();
  }
  const at::Tensor of_a = a.detach();
  a.set_data(b.detach());
  b.set_data(of_a);
  ParameterBlock::adopt_replaced({&first, &second});
  for (ParameterBlock* const block : {&first, &second}) {
    block->settle();
    block->repoint();
  }
  CHECK(at::equal(a, at::full({3}, 3.0)));
  CHECK(at::equal(b, at::full({3}, 2.0)));
}

TEST_CASE("block: a parameter that changed shape or dtype is refused, with its name and both forms") {
  at::Tensor parameter = at::zeros({2, 3});
  const std::vector<at::Tensor> replacements = {at::zeros({3, 2}), at::zeros({2, 3}, at::kDouble)};
  for (const at::Tensor& replacement : replacements) {
    ParameterBlock block = block_of({parameter});
    const at::Tensor original = parameter.detach().clone();
    parameter.set_data(replacement);
    std::string message;
    try {
      ParameterBlock::adopt_replaced({&block});
    } catch (const std::invalid_argument& error) {
      message = error.what();
    }
    INFO("message: ", message);
    CHECK(message.starts_with("[RoundPipe] parameter 'p0' has become "));
    CHECK(message.find("(was Float[2, 3]") != std::string::npos);
    parameter.set_data(original);
  }
}

TEST_CASE("block: parameters that are not on the host are refused by name") {
  std::string message;
  try {
    block_of({at::zeros({2}), at::empty({2}, at::TensorOptions().device(at::kMeta))});
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CHECK(message.find("'p1' is on meta") != std::string::npos);
}

TEST_CASE("block: no parameters, no bytes") {
  ParameterBlock block = block_of({});
  CHECK(block.buffers()->host_bytes() == 0);
  ParameterBlock::Update first = block.begin_update(Reads::kAfterAndGraphs);
  block.copy_in(first, {});
  CHECK(block.current()->published->complete());
}

TEST_CASE("block: fused updates; a synchronous one is read at once, an asynchronous one after the next") {
  const at::Tensor parameter = at::zeros({8});
  ParameterBlock block = block_of({parameter});
  const auto make = [&](const ParameterBlock::Update& update, double value) {
    update.after->flat = block.buffers()->take();
    block.layout().view(update.after->flat, 0).fill_(value);
    update.after->published->fire();
  };
  const WeightVersionPtr version0 = block.current();
  ParameterBlock::Update first = block.begin_update(Reads::kBefore);
  CHECK(first.before == version0);
  CHECK(block.current() == version0);
  CHECK_FALSE(block.settled());
  make(first, 1);
  const EventPtr upload = make_event();
  block.add_reader(version0, upload);

  ParameterBlock::Update second = block.begin_update(Reads::kBefore);
  CHECK(second.before == first.after);
  CHECK(block.current() == first.after);
  CHECK(version0->retired);
  CHECK(version0->flat.defined());  // an upload still reads it
  upload->fire();
  CHECK_FALSE(version0->flat.defined());
  CHECK(block.settle());
  CHECK_FALSE(block.settle());
  block.repoint();
  CHECK(parameter.isnan().all().item<bool>());
  CHECK_FALSE(block.shows_weights());
  make(second, 2);
  block.repoint();
  CHECK(at::equal(parameter, at::full({8}, 2.0)));
  CHECK(block.settled());

  ParameterBlock::Update third = block.begin_update(Reads::kAfter);
  CHECK(block.current() == third.after);
  make(third, 3);
  block.repoint();
  CHECK(at::equal(parameter, at::full({8}, 3.0)));
  CHECK(block.buffers()->peak_bytes() <= 2 * block.layout().size_bytes);
}

namespace {

// Two float32 tensors [2] and [3, 1] in one mapped file: 0, 1 and 2, 3, 4.
std::vector<at::Tensor> mapped_tensors() {
  std::string path = (std::filesystem::temp_directory_path() / "roundpipe_block_XXXXXX").string();
  const int descriptor = mkstemp(path.data());
  const std::vector<float> values{0, 1, 2, 3, 4};
  REQUIRE(write(descriptor, values.data(), 20) == 20);
  close(descriptor);
  const at::Tensor numbers = map_file(path).view(at::kFloat);
  std::filesystem::remove(path);
  return {numbers.narrow(0, 0, 2), numbers.narrow(0, 2, 3).view({3, 1})};
}

}  // namespace

TEST_CASE("block: frozen parameters in mapped files stay there and take no memory") {
  const std::vector<at::Tensor> tensors = mapped_tensors();
  ParameterBlock block = block_of(tensors);
  const WeightVersionPtr reading = block.current();
  CHECK(reading->published->complete());
  CHECK_FALSE(reading->flat.defined());
  REQUIRE(reading->parts.size() == 2);
  CHECK(reading->parts[1].data_ptr() == tensors[1].data_ptr());
  CHECK(block.buffers()->host_bytes() == 0);
  CHECK(block.shows_weights());
  CHECK(block.layout().size_bytes > 0);

  tensors[0].fill_(7);
  block.repoint();
  CHECK(is_mapped(tensors[0]));
  CHECK(at::equal(block.current()->parts[0], at::full({2}, 7.0F)));

  at::Tensor(tensors[1]).set_data(at::ones({3, 1}));
  ParameterBlock::adopt_replaced({&block});
  CHECK(is_mapped(tensors[1]));
  CHECK(at::equal(block.current()->parts[1], at::ones({3, 1})));
}

TEST_CASE("block: one parameter that is trained has all of a mapped block copied") {
  const std::vector<at::Tensor> tensors = mapped_tensors();
  ParameterBlock block = block_of(tensors);
  const WeightVersionPtr pending = block.current();
  at::Tensor(tensors[1]).set_requires_grad(true);
  block.own_trainable();
  CHECK_FALSE(is_mapped(tensors[0]));
  CHECK(at::equal(read_values(block, block.current())[1], at::tensor({2.0F, 3.0F, 4.0F}).view({3, 1})));
  CHECK(block.buffers()->host_bytes() == block.layout().size_bytes);
  CHECK(pending->parts.size() == 2);
  CHECK(at::equal(pending->parts[0], at::tensor({0.0F, 1.0F})));

  ParameterBlock trained = block_of({mapped_tensors()[0].set_requires_grad(true)});
  CHECK(trained.current()->flat.defined());
  const ParameterBlock mixed = block_of({mapped_tensors()[0], at::ones({2})});
  CHECK(mixed.current()->flat.defined());
}
