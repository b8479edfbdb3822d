#include <roundpipe/roundpipe.h>

#include <ATen/Context.h>
#include <doctest/doctest.h>
#include <torch/nn.h>

#include <roundpipe/device/fault.h>
#include <roundpipe/runtime/engine.h>

using namespace roundpipe;

TEST_SUITE("devices") {
  TEST_CASE("they are replaced and described") {
    set_devices("virtual:2,memory=64MB");
    const std::vector<DeviceInfo> two = devices();
    REQUIRE(two.size() == 2);
    CHECK(two[1].name == "virtual:1");
    CHECK(two[1].torch_device.is_cpu());
    CHECK(two[0].limit_bytes == 64'000'000);
    CHECK(two[0].failure.empty());
    CHECK_THROWS_AS(set_devices("nonsense"), std::invalid_argument);
    CHECK(devices().size() == 2);
  }

  TEST_CASE("a device that fails is named, and comes back; training goes on if it may") {
    set_devices("virtual:2");
    at::manual_seed(1);
    torch::nn::Sequential layers(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    Model model(layers);
    model.run_options().fault_tolerant = true;
    const auto loss = [](const at::Tensor& outputs) { return outputs.square().sum(); };
    const at::Tensor batch = at::randn({6, 4});
    const at::Tensor expected = model.forward_backward(batch, std::tuple<>(), loss).loss;
    runtime::Engine::current()->pool_worker(0).device().inject(device::parse_fault("error@1"));
    CHECK(at::equal(model.forward_backward(batch, std::tuple<>(), loss).loss, expected));
    model.synchronize();
    CHECK_FALSE(devices()[0].failure.empty());
    CHECK(restore_devices() == std::vector<std::string>{"virtual:0"});
    CHECK(devices()[0].failure.empty());
    model.run_options().fault_tolerant = false;
    runtime::Engine::current()->pool_worker(0).device().inject(device::parse_fault("error@1"));
    CHECK_THROWS_AS(
        [&] {
          model.forward_backward(batch, std::tuple<>(), loss);
          model.synchronize();
        }(),
        DeviceError);
    CHECK(at::equal(model.forward_backward(batch, std::tuple<>(), loss).loss, expected));
  }

  TEST_CASE("fp16 accumulation belongs to the pool") {
    at::Context& torch = at::globalContext();
    set_devices("virtual:2", true);
    CHECK(torch.allowFP16AccumulationCuBLAS());
    torch::nn::Sequential layers(torch::nn::Linear(4, 4));
    Model model(layers);
    const auto step = [&] {
      model.forward_backward(at::ones({2, 4}), std::tuple<>(), [](const at::Tensor& outputs) { return outputs.sum(); });
      model.synchronize();
    };
    CHECK_NOTHROW(step());
    torch.setAllowFP16AccumulationCuBLAS(false);
    CHECK_THROWS_WITH_AS(step(), doctest::Contains("is False, and the pool was made with fp16_accumulation"),
                         std::invalid_argument);
    torch.setAllowFP16AccumulationCuBLAS(true);
    CHECK_NOTHROW(step());
    set_devices("virtual:2");
    CHECK_FALSE(torch.allowFP16AccumulationCuBLAS());
    CHECK_NOTHROW(step());
  }

  TEST_CASE("memory peaks start again") {
    set_devices("virtual:1");
    torch::nn::Sequential layers(torch::nn::Linear(64, 64));
    Model model(layers);
    const at::NoGradGuard no_grad;
    model.forward(at::randn({6, 64}));
    const int64_t peak = devices()[0].peak_bytes;
    CHECK(peak > 64 * 64 * 4);
    reset_peak_memory();
    CHECK(devices()[0].peak_bytes <= peak);
  }
}
