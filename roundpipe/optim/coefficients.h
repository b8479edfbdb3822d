#pragma once

#include <cstdint>

#include <roundpipe/optim/algorithm.h>

namespace roundpipe::optim {

// start + weight * (end - start) as one fused multiply-add that starts from the nearer end.
struct Interpolation {
  float coefficient = 0;
  bool from_end = false;
};
Interpolation interpolation(double weight_fp64);

// What the kernels need to know about one step of one parameter: everything computed in fp64, then rounded to fp32
// where torch.optim rounds. What an algorithm does not name keeps its default.
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
  Interpolation first;       // towards the gradient: exp_avg (RMSprop: grad_avg)
  float second_decay = 0;    // what remains of exp_avg_sq (and of its like), and
  float second_weight = 0;   // how much of the squared gradient comes in
  float second_divisor = 1;  // bias correction of exp_avg_sq or of its square root
  float first_divisor = 1;   // RAdam: bias correction of exp_avg
  float eps = 0;
  float rate = 0;             // step size, with the sign it is added with
  float second_rate = 0;      // NAdam: of exp_avg, `rate` is the gradient's
  float momentum = 0;         // SGD and RMSprop: what remains of the buffer; Lion: of exp_avg in the update
  float momentum_weight = 0;  // how much of the gradient comes in
  float rectification = 0;    // RAdam
  float mu = 1;               // ASGD
  float eta_minus = 0;        // Rprop
  float eta_plus = 0;
  float step_size_min = 0;
  float step_size_max = 0;
  uint32_t dither_seed = 0;  // 8-bit moments: rounding differs from step to step
};

// Counts one step in `scalars` and returns its coefficients. Not for Adafactor, whose coefficients depend on tensors.
Coefficients advance(Algorithm algorithm, const Hyperparameters& hyper, Scalars& scalars);

}  // namespace roundpipe::optim
