#include <roundpipe/optim/option_names.h>

#include <algorithm>

namespace roundpipe::optim {

namespace {

using Number = OptionNames::Number;
using Flag = OptionNames::Flag;

constexpr std::pair<const char*, Number> kLr{"lr", &Hyperparameters::lr};
constexpr std::pair<const char*, Number> kDecay{"weight_decay", &Hyperparameters::weight_decay};
constexpr std::pair<const char*, Number> kEps{"eps", &Hyperparameters::eps};
constexpr std::pair<const char*, Number> kMomentum{"momentum", &Hyperparameters::momentum};
constexpr std::pair<const char*, Number> kAlpha{"alpha", &Hyperparameters::alpha};
constexpr std::pair<const char*, std::pair<Number, Number>> kBetas{"betas",
                                                                   {&Hyperparameters::beta1, &Hyperparameters::beta2}};
constexpr std::pair<const char*, Flag> kMaximize{"maximize", &Hyperparameters::maximize};
constexpr std::pair<const char*, Flag> kDecoupled{"decoupled_weight_decay", &Hyperparameters::decoupled_weight_decay};

}  // namespace

const OptionNames& option_names(Algorithm algorithm) {
  // Never destroyed: saves go on while the process ends.
  static const auto& all = *new std::vector<OptionNames>{
      {Algorithm::kAdam,
       "Adam",
       {kLr, kEps, kDecay},
       {kBetas},
       {{"amsgrad", &Hyperparameters::amsgrad}, kMaximize, kDecoupled}},
      {Algorithm::kAdamW, "AdamW", {kLr, kEps, kDecay}, {kBetas}, {{"amsgrad", &Hyperparameters::amsgrad}, kMaximize}},
      {Algorithm::kSGD,
       "SGD",
       {kLr, kMomentum, {"dampening", &Hyperparameters::dampening}, kDecay},
       {},
       {{"nesterov", &Hyperparameters::nesterov}, kMaximize}},
      {Algorithm::kAdagrad,
       "Adagrad",
       {kLr,
        {"lr_decay", &Hyperparameters::lr_decay},
        kDecay,
        {"initial_accumulator_value", &Hyperparameters::initial_accumulator_value},
        kEps},
       {},
       {kMaximize}},
      {Algorithm::kAdadelta, "Adadelta", {kLr, {"rho", &Hyperparameters::rho}, kEps, kDecay}, {}, {kMaximize}},
      {Algorithm::kAdamax, "Adamax", {kLr, kEps, kDecay}, {kBetas}, {kMaximize}},
      {Algorithm::kNAdam,
       "NAdam",
       {kLr, kEps, kDecay, {"momentum_decay", &Hyperparameters::momentum_decay}},
       {kBetas},
       {kMaximize, kDecoupled}},
      {Algorithm::kRAdam, "RAdam", {kLr, kEps, kDecay}, {kBetas}, {kMaximize, kDecoupled}},
      {Algorithm::kRMSprop,
       "RMSprop",
       {kLr, kMomentum, kAlpha, kEps, kDecay},
       {},
       {{"centered", &Hyperparameters::centered}, kMaximize}},
      {Algorithm::kRprop,
       "Rprop",
       {kLr},
       {{"etas", {&Hyperparameters::eta_minus, &Hyperparameters::eta_plus}},
        {"step_sizes", {&Hyperparameters::step_size_min, &Hyperparameters::step_size_max}}},
       {kMaximize}},
      {Algorithm::kASGD,
       "ASGD",
       {kLr, {"lambd", &Hyperparameters::lambd}, kAlpha, {"t0", &Hyperparameters::t0}, kDecay},
       {},
       {kMaximize}},
      {Algorithm::kAdafactor,
       "Adafactor",
       {kLr, {"beta2_decay", &Hyperparameters::beta2_decay}, {"d", &Hyperparameters::clip_threshold}, kDecay},
       {{"eps", {&Hyperparameters::eps, &Hyperparameters::eps2}}},
       {kMaximize}},
      {Algorithm::kLion, "Lion", {kLr, kDecay}, {kBetas}, {kMaximize}},
      {Algorithm::kMuon,
       "Muon",
       {kLr, kDecay, kMomentum, kEps},
       {kBetas},
       {{"nesterov", &Hyperparameters::nesterov}, {"use_muon", &Hyperparameters::use_muon}},
       {{"ns_coefficients", {&Hyperparameters::ns_a, &Hyperparameters::ns_b, &Hyperparameters::ns_c}}},
       {{"ns_steps", &Hyperparameters::ns_steps}},
       {{"adjust_lr_fn", &Hyperparameters::match_rms_adamw, "original", "match_rms_adamw"}}},
  };
  return *std::ranges::find(all, algorithm, &OptionNames::algorithm);
}

}  // namespace roundpipe::optim
