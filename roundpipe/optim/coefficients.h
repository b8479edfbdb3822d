#pragma once

#include <cstdint>

#include <roundpipe/optim/algorithm.h>

namespace roundpipe::optim {

// start + weight * (end - start), as one fused multiply-add that starts from the nearer end.
struct Interpolation {
  float coefficient = 0;
  bool from_end = false;
};
Interpolation interpolation(double weight_fp64);

// The coefficients of one step of one parameter, for the kernels. All are computed in fp64 and rounded to fp32 where
// torch.optim rounds. Coefficients that an algorithm does not use keep their defaults.
struct Coefficients {
  Algorithm algorithm = Algorithm::kSGD;
  bool maximize = false;
  bool amsgrad = false;
  bool nesterov = false;
  bool centered = false;
  bool has_momentum = false;
  bool first_step = false;   // SGD: the momentum buffer becomes the gradient
  bool rectified = false;    // RAdam
  bool averages = false;     // ASGD: ax lags behind the weights
  float weight_decay = 0;    // gradient += weight_decay * weights
  float decay = 1;           // weights *= decay, after that
  Interpolation first;       // of exp_avg (RMSprop: grad_avg) towards the gradient
  float second_decay = 0;    // of exp_avg_sq and similar states
  float second_weight = 0;   // of the squared gradient in them
  float second_divisor = 1;  // bias correction of exp_avg_sq or of its square root
  float first_divisor = 1;   // RAdam: bias correction of exp_avg
  float eps = 0;
  float rate = 0;             // step size, with the sign for adding it
  float second_rate = 0;      // NAdam: step size of exp_avg; `rate` is that of the gradient
  float momentum = 0;         // SGD and RMSprop: decay of the buffer; Lion: weight of exp_avg in the update
  float momentum_weight = 0;  // weight of the gradient in the buffer
  float rectification = 0;    // RAdam
  float mu = 1;               // ASGD
  float eta_minus = 0;        // Rprop
  float eta_plus = 0;
  float step_size_min = 0;
  float step_size_max = 0;
  uint32_t dither_seed = 0;  // 8-bit moments: makes rounding differ from step to step
  int64_t first_element =
      0;  // 8-bit moments: of a part of a parameter, where it begins, so that it rounds as the whole
};

// Counts one step in `scalars` and returns its coefficients. Not for Adafactor and Muon, whose coefficients depend on
// tensors.
Coefficients advance(Algorithm algorithm, const Hyperparameters& hyper, Scalars& scalars);

}  // namespace roundpipe::optim
