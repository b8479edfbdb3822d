#pragma once

namespace roundpipe::optim {

// The update rules, as torch.optim defines them under the same names. Lion: Chen et al. 2023, arXiv:2302.06675. Groups
// of Muon with `use_muon` off are stepped by AdamW: those of parameters that are no matrices of hidden layers.
enum class Algorithm {
  kAdam,
  kAdamW,
  kSGD,
  kAdagrad,
  kAdadelta,
  kAdamax,
  kNAdam,
  kRAdam,
  kRMSprop,
  kRprop,
  kASGD,
  kAdafactor,
  kLion,
  kMuon
};

struct GivenHyperparameters;

// The hyperparameters of a step, under torch.optim's names. Each algorithm reads the ones it knows.
struct Hyperparameters {
  // All of them, as given ones; see hyperparameters.h.
  operator GivenHyperparameters() const;

  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;   // Adafactor: eps[0]
  double eps2 = 1e-3;  // Adafactor: eps[1]
  double weight_decay = 0;
  double momentum = 0;
  double dampening = 0;
  double alpha = 0.99;
  double rho = 0.9;
  double lr_decay = 0;
  double momentum_decay = 4e-3;
  double lambd = 1e-4;
  double t0 = 1e6;
  double eta_minus = 0.5;
  double eta_plus = 1.2;
  double step_size_min = 1e-6;
  double step_size_max = 50;
  double beta2_decay = -0.8;
  double clip_threshold = 1;             // Adafactor: d
  double initial_accumulator_value = 0;  // Adagrad
  double ns_a = 3.4445;                  // Muon: ns_coefficients
  double ns_b = -4.775;
  double ns_c = 2.0315;
  double ns_steps = 5;
  bool nesterov = false;
  bool amsgrad = false;
  bool maximize = false;
  bool centered = false;
  bool decoupled_weight_decay = false;  // weight decay as in AdamW, for Adam, NAdam and RAdam
  bool match_rms_adamw = false;         // Muon: adjust_lr_fn, which is "original" if this is off
  bool use_muon = true;                 // Muon: off: AdamW steps the group
};

// The format of moments: fp32, or one byte each with an fp32 scale per block (only Adam and AdamW without amsgrad).
enum class MomentFormat { kFloat32, kBlockwise8Bit };

// The format of the fp32 masters of 16-bit weights: exact, or, of bf16 weights alone, the upper 24 of their bits. Those
// are rounded up or down by chance after each update, so that their mean is the exact result's.
enum class MasterFormat { kFloat32, k24Bit };

// How an optimizer keeps what it knows of a parameter.
struct StateFormat {
  StateFormat(MomentFormat of_moments = MomentFormat::kFloat32, MasterFormat of_masters = MasterFormat::kFloat32)
      : moments(of_moments), masters(of_masters) {}

  MomentFormat moments;
  MasterFormat masters;
};

// The scalar state of one parameter from step to step. The defaults hold until the first step.
struct Scalars {
  double step = 0;
  double mu_product = 1;  // NAdam
  double eta = 0;         // ASGD; its first step starts from lr
  double mu = 1;          // ASGD
};

}  // namespace roundpipe::optim
