#include <memory>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include <roundpipe/ops/chunked_mlp.h>
#include <roundpipe/ops/projection.h>
#include <roundpipe/torch_compat/autograd_nodes.h>

using namespace roundpipe::ops;

namespace projection_test {

int products = 0;  // matrix products of this thread, counted while a Count lives

class Count {
 public:
  Count() {
    products = 0;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
          const std::string_view name = function.name();
          products += name == "aten::mm" || name == "aten::addmm" ? 1 : 0;
          return nullptr;
        }));
  }
  ~Count() { at::removeCallback(handle_); }
  Count(const Count&) = delete;
  Count& operator=(const Count&) = delete;

 private:
  at::CallbackHandle handle_;
};

at::Tensor leaf(at::IntArrayRef shape, at::ScalarType dtype, bool trained = true) {
  return at::randn(shape).to(dtype).requires_grad_(trained);
}

// The gradients of `inputs`, zeros where there is none.
std::vector<at::Tensor> gradients(const at::Tensor& output, const std::vector<at::Tensor>& inputs) {
  const at::Tensor gradient =
      at::arange(output.numel(), at::kFloat).sin_().view(output.sizes()).to(output.scalar_type());
  std::vector<at::Tensor> wanted;
  for (const at::Tensor& input : inputs) {
    if (input.requires_grad()) wanted.push_back(input);
  }
  return torch::autograd::grad({output}, wanted, {gradient});
}

void check_same(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    CHECK((found[i].sizes() == expected[i].sizes()));
    CHECK(found[i].equal(expected[i]));
  }
}

TEST_CASE("project: a result that nobody reads takes no product, and has the same gradients") {
  at::manual_seed(1);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const std::vector<int64_t>& shape :
         {std::vector<int64_t>{2, 7, 12}, {7, 12}, {1, 1, 12}, {1, 12}, {3, 1, 1}, {2, 3, 4, 12}}) {
      for (const bool has_bias : {false, true}) {
        for (const bool trains_weight : {false, true}) {
          CAPTURE(shape.size());
          CAPTURE(has_bias);
          CAPTURE(trains_weight);
          const at::Tensor input = leaf(shape, dtype), weight = leaf({5, shape.back()}, dtype, trains_weight);
          Projection projection{weight};
          std::vector<at::Tensor> inputs{input, weight};
          if (has_bias) inputs.push_back(*(projection.bias = leaf({5}, dtype)));
          const at::Tensor read = project(input, projection);
          const Count count;
          const at::Tensor unread = project(input, projection, {.is_read = false});
          CHECK(products == 0);
          CHECK((unread.sizes() == read.sizes()));
          CHECK((unread.scalar_type() == read.scalar_type()));
          check_same(gradients(unread, inputs), gradients(read, inputs));
        }
      }
    }
  }
}

TEST_CASE("project: an adapter's second product is left out as well") {
  at::manual_seed(2);
  const at::Tensor input = leaf({2, 7, 12}, at::kBFloat16);
  Projection projection{leaf({5, 12}, at::kBFloat16, false)};
  projection.adapter = LowRankAdapter{leaf({3, 12}, at::kFloat), leaf({5, 3}, at::kFloat)};
  projection.adapter->scaling = 0.3;
  projection.adapter->dropout = 0.5;
  projection.adapter->training = true;
  const std::vector<at::Tensor> inputs{input, projection.adapter->down, projection.adapter->up};
  at::manual_seed(3);
  const at::Tensor read = project(input, projection);
  at::manual_seed(3);
  const Count count;
  const at::Tensor unread = project(input, projection, {.is_read = false});
  CHECK(products == 1);
  CHECK((unread.scalar_type() == at::kBFloat16));
  check_same(gradients(unread, inputs), gradients(read, inputs));
}

TEST_CASE("project: where no graph is made, under autocast and for inputs with gaps, the product runs") {
  at::manual_seed(4);
  const at::Tensor input = leaf({2, 7, 12}, at::kFloat), weight = leaf({5, 12}, at::kFloat);
  const auto runs = [&](const at::Tensor& given) {
    const Count count;
    const at::Tensor result = project(given, {weight}, {.is_read = false});
    CHECK(products > 0);
    CHECK(result.equal(project(given, {weight})));
  };
  {
    const at::NoGradGuard no_grad;
    runs(input);
  }
  runs(input.transpose(0, 1));
  at::autocast::set_autocast_enabled(at::kCPU, true);
  runs(input);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  const at::Tensor abstract = input.to(at::kMeta).detach().requires_grad_(true);
  CHECK((project(abstract, {weight.to(at::kMeta)}, {.is_read = false}).sizes() == at::IntArrayRef{2, 7, 5}));
}

TEST_CASE("gated_mlp: a result that nobody reads, with chunks and without") {
  at::manual_seed(5);
  const at::Tensor input = leaf({2, 11, 4}, at::kFloat);
  const Projection gate{leaf({6, 4}, at::kFloat)}, up{leaf({6, 4}, at::kFloat)}, down{leaf({4, 6}, at::kFloat)};
  const std::vector<at::Tensor> inputs{input, gate.weight.values(), up.weight.values(), down.weight.values()};
  for (const int64_t chunk : {0, 4, 11}) {
    CAPTURE(chunk);
    const at::Tensor read = gated_mlp(input, gate, up, down, Activation::kSilu, chunk);
    Count count;
    const at::Tensor unread = gated_mlp(input, gate, up, down, Activation::kSilu, chunk, false);
    CHECK(products == (chunk == 4 ? 0 : 2));
    CHECK((unread.sizes() == read.sizes()));
    products = 0;
    const std::vector<at::Tensor> found = gradients(unread, inputs);
    // A chunk's own forward leaves the last product out, too: two of its three, and two for each of three gradients.
    CHECK(products == (chunk == 4 ? 3 * 8 : 6));
    check_same(found, gradients(read, inputs));
  }
}

TEST_CASE("project: a gradient goes into a sum as a product, if somebody takes it") {
  struct Sum final : roundpipe::torch_compat::GradientConsumer {
    void consume(at::Tensor gradient) override { handed = std::move(gradient); }
    bool add_product(const at::Tensor& left, const at::Tensor& right) override {
      if (!takes) return false;
      product = left.mm(right);
      return true;
    }
    bool takes = true;
    at::Tensor handed, product;
  };
  at::manual_seed(6);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for (const bool takes : {true, false}) {
      for (const bool is_read : {true, false}) {
        CAPTURE(takes);
        CAPTURE(is_read);
        const at::Tensor input = leaf({2, 7, 12}, dtype), weight = leaf({5, 12}, dtype), bias = leaf({5}, dtype);
        const at::Tensor given = at::ones({2, 7, 5}, input.options().requires_grad(false));
        const at::Tensor expected = torch::autograd::grad({project(input, {weight, bias})}, {weight}, {given})[0];
        const auto sum = c10::make_intrusive<Sum>();
        sum->takes = takes;
        roundpipe::torch_compat::consume_gradients(weight, sum);
        const at::Tensor result = project(input, {weight, bias}, {.is_read = is_read, .sums_products = true});
        if (is_read) CHECK(result.equal(project(input, {weight, bias})));
        torch::autograd::backward({result}, {given});
        const bool summed = takes && dtype != at::kFloat;
        CHECK(sum->product.defined() == summed);
        CHECK(sum->handed.defined() == !summed);
        CHECK((summed ? sum->product : sum->handed).equal(expected));
        CHECK((input.grad().defined() && bias.grad().defined()));
      }
    }
  }
}

}  // namespace projection_test
