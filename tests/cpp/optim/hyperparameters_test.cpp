#include <roundpipe/optim/hyperparameters.h>

#include <cmath>
#include <stdexcept>

#include <doctest/doctest.h>

using namespace roundpipe::optim;

TEST_SUITE("hyperparameters") {
  TEST_CASE("those that are given stand in place of the rule's") {
    const Hyperparameters rule{.lr = 0.5, .momentum = 0.9, .nesterov = true};
    const Hyperparameters made = GivenHyperparameters{.weight_decay = 0.25, .nesterov = false}.over(rule);
    CHECK(made.lr == 0.5);
    CHECK(made.momentum == 0.9);
    CHECK(made.weight_decay == 0.25);
    CHECK_FALSE(made.nesterov);
    // All of another set are given.
    const GivenHyperparameters whole = Hyperparameters{.lr = 2};
    CHECK(whole.over(rule).lr == 2);
    CHECK(whole.over(rule).momentum == 0);
    CHECK_FALSE(whole.over(rule).nesterov);
  }

  TEST_CASE("what torch's constructors refuse is refused, and NaN") {
    const auto refuses = [](Algorithm algorithm, double Hyperparameters::* member, double value) {
      Hyperparameters hyper = default_hyperparameters(algorithm);
      check(algorithm, hyper, "");
      hyper.*member = value;
      CHECK_THROWS_AS(check(algorithm, hyper, "[here] "), std::invalid_argument);
    };
    for (const auto member : {&Hyperparameters::lr, &Hyperparameters::dampening, &Hyperparameters::lambd,
                              &Hyperparameters::step_size_max, &Hyperparameters::beta2_decay}) {
      refuses(Algorithm::kAdam, member, std::nan(""));
    }
    refuses(Algorithm::kSGD, &Hyperparameters::lr, -1);
    refuses(Algorithm::kSGD, &Hyperparameters::momentum, -0.1);
    refuses(Algorithm::kAdamW, &Hyperparameters::beta2, 1);
    refuses(Algorithm::kAdadelta, &Hyperparameters::rho, 1.5);
    refuses(Algorithm::kRprop, &Hyperparameters::eta_plus, 1);
    refuses(Algorithm::kRprop, &Hyperparameters::eta_minus, 0);
    refuses(Algorithm::kAdafactor, &Hyperparameters::clip_threshold, 0.5);
    refuses(Algorithm::kAdafactor, &Hyperparameters::beta2_decay, 0.1);
    refuses(Algorithm::kMuon, &Hyperparameters::ns_steps, 100);
    refuses(Algorithm::kMuon, &Hyperparameters::ns_steps, 2.5);
    CHECK_THROWS_AS(check(Algorithm::kMuon, Hyperparameters{.maximize = true}, ""), std::invalid_argument);
  }

  TEST_CASE("nesterov needs a momentum and no dampening") {
    Hyperparameters hyper{.nesterov = true};
    CHECK_THROWS_WITH_AS(check(Algorithm::kSGD, hyper, "[here] "), doctest::Contains("[here] nesterov"),
                         std::invalid_argument);
    hyper.momentum = 0.9;
    check(Algorithm::kSGD, hyper, "");
    hyper.dampening = 0.1;
    CHECK_THROWS_AS(check(Algorithm::kSGD, hyper, ""), std::invalid_argument);
  }
}
