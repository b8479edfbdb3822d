#include <roundpipe/torch_compat/own_generators.h>

#include <functional>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/custom_function.h>

using roundpipe::torch_compat::OwnGenerators;

namespace {

at::Tensor default_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  return generator.get_state();
}

// Every operator of torch's C++ interface that draws random numbers, by name.
const std::vector<std::pair<const char*, std::function<at::Tensor()>>>& draws() {
  static const std::vector<std::pair<const char*, std::function<at::Tensor()>>> all = {
      {"rand", [] { return at::rand({5}); }},
      {"randn", [] { return at::randn({5}); }},
      {"randint", [] { return at::randint(100, {5}); }},
      {"randperm", [] { return at::randperm(9); }},
      {"rand_like", [] { return at::rand_like(at::ones({5})); }},
      {"randn_like", [] { return at::randn_like(at::ones({5})); }},
      {"randint_like", [] { return at::randint_like(at::ones({5}), 100); }},
      {"normal of a size", [] { return at::normal(0.0, 1.0, {5}); }},
      {"normal of a tensor", [] { return at::normal(at::ones({5}), 1.0); }},
      {"bernoulli", [] { return at::bernoulli(at::full({64}, 0.5)); }},
      {"bernoulli_", [] { return at::ones({64}).bernoulli_(0.5); }},
      {"uniform_", [] { return at::ones({5}).uniform_(); }},
      {"normal_", [] { return at::ones({5}).normal_(); }},
      {"random_", [] { return at::ones({5}).random_(); }},
      {"random_ to", [] { return at::ones({5}).random_(1000); }},
      {"exponential_", [] { return at::ones({5}).exponential_(); }},
      {"geometric_", [] { return at::ones({64}).geometric_(0.2); }},
      {"cauchy_", [] { return at::ones({5}).cauchy_(); }},
      {"log_normal_", [] { return at::ones({5}).log_normal_(); }},
      {"poisson", [] { return at::poisson(at::full({64}, 3.0)); }},
      {"binomial", [] { return at::binomial(at::full({64}, 9.0), at::full({64}, 0.5)); }},
      {"multinomial", [] { return at::multinomial(at::ones({64}), 5); }},
      {"gamma", [] { return at::_standard_gamma(at::ones({5})); }},
      {"dirichlet", [] { return at::_sample_dirichlet(at::ones({5})); }},
      {"dropout", [] { return at::dropout(at::ones({64}), 0.5, true); }},
      {"native_dropout", [] { return std::get<0>(at::native_dropout(at::ones({64}), 0.5, true)); }},
      {"alpha_dropout", [] { return at::alpha_dropout(at::ones({64}), 0.5, true); }},
      {"feature_dropout", [] { return at::feature_dropout(at::ones({64, 2, 2}), 0.5, true); }},
      {"rrelu", [] { return at::rrelu(-at::ones({64}), 0.1, 0.3, true); }},
      {"attention with dropout",
       [] {
         const at::Tensor values = at::ones({1, 1, 8, 4});
         return at::scaled_dot_product_attention(values, values, values, {}, 0.5);
       }},
      {"a default generator by name", [] { return at::rand({5}, at::detail::getDefaultCPUGenerator()); }},
  };
  return all;
}

struct DrawsInBackward : torch::autograd::Function<DrawsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& input) { return input.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {at::rand_like(gradients[0])};
  }
};

}  // namespace

TEST_SUITE("own generators") {
  TEST_CASE("what is drawn is what torch draws after the same seed, and the default generator does not notice") {
    const auto own = std::make_shared<OwnGenerators>();
    for (const auto& [name, draw] : draws()) {
      CAPTURE(name);
      at::manual_seed(23);
      const at::Tensor expected = draw();
      at::manual_seed(5);
      const at::Tensor before = default_state();
      own->seed(23);
      at::Tensor drawn;
      {
        const OwnGenerators::Scope scope(own);
        drawn = draw();
      }
      CHECK(drawn.equal(expected));
      CHECK(default_state().equal(before));
      // Outside, the default generator draws.
      draw();
      CHECK_FALSE(default_state().equal(before));
    }
  }

  TEST_CASE("a generator that is given is drawn from") {
    const auto own = std::make_shared<OwnGenerators>();
    at::Generator given = at::detail::createCPUGenerator(3);
    const at::Tensor expected = at::rand({4}, given);
    given.set_current_seed(3);
    const OwnGenerators::Scope scope(own);
    CHECK(at::rand({4}, given).equal(expected));
  }

  TEST_CASE("one scope goes on where the last one of the same generators stopped, seeded or not") {
    const auto own = std::make_shared<OwnGenerators>();
    at::Generator expected = at::detail::createCPUGenerator(roundpipe::torch_compat::kUnseeded);
    for (int i = 0; i < 3; ++i) {
      const OwnGenerators::Scope scope(own);
      CHECK(at::rand({4}).equal(at::rand({4}, expected)));
    }
  }

  TEST_CASE("scopes of threads and inside each other are their own") {
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (uint64_t seed = 0; seed < 4; ++seed) {
      threads.emplace_back([&wrong, seed] {
        const auto outer = std::make_shared<OwnGenerators>();
        const auto inner = std::make_shared<OwnGenerators>();
        for (int i = 0; i < 200; ++i) {
          outer->seed(seed);
          at::Generator expected = at::detail::createCPUGenerator(seed);
          const OwnGenerators::Scope scope(outer);
          if (!at::rand({3}).equal(at::rand({3}, expected))) ++wrong;
          {
            const OwnGenerators::Scope nested(inner);
            at::rand({3});
          }
          if (!at::rand({3}).equal(at::rand({3}, expected))) ++wrong;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(OwnGenerators::current() == nullptr);
  }

  TEST_CASE("a backward pass that is begun inside draws from them") {
    const auto own = std::make_shared<OwnGenerators>();
    own->seed(9);
    const at::Tensor before = default_state();
    const at::Tensor leaf = at::ones({6}).requires_grad_();
    const OwnGenerators::Scope scope(own);
    DrawsInBackward::apply(leaf).sum().backward();
    at::Generator expected = at::detail::createCPUGenerator(9);
    CHECK(leaf.grad().equal(at::rand({6}, expected)));
    CHECK(default_state().equal(before));
  }

  TEST_CASE("drawn_from names the generator of the thread") {
    CHECK(OwnGenerators::drawn_from(c10::kCPU) == at::detail::getDefaultCPUGenerator());
    const auto own = std::make_shared<OwnGenerators>();
    const OwnGenerators::Scope scope(own);
    CHECK(OwnGenerators::drawn_from(c10::kCPU) == own->of(c10::kCPU));
    const at::Generator standard = at::detail::createCPUGenerator();  // a card's
    const OwnGenerators::Shared shared(*own, standard);
    CHECK(OwnGenerators::drawn_from(c10::kCPU) == own->of(c10::kCPU));
    own->seed(11);
    CHECK(standard.current_seed() == 11);
  }
}
