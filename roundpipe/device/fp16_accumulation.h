#pragma once

#include <optional>
#include <string>

namespace roundpipe::device {

// Whether products of fp16 matrices on CUDA devices are added up in fp16: GeForce cards do that at twice the rate, with
// fewer bits. It is a switch of the whole process, torch.backends.cuda.matmul.allow_fp16_accumulation; other devices,
// virtual ones among them, compute the same with it and without.
//
// What the environment variable ROUNDPIPE_FP16_ACCUMULATION asks for: no, unless it is 1. Throws std::invalid_argument
// if it is neither 0 nor 1.
bool wants_fp16_accumulation();

// Throws std::invalid_argument unless torch's switch is as a pool was made with.
void require_fp16_accumulation(bool on);

// For the user whose training goes on with another choice than it had. Empty: with the same.
std::string changed_fp16_accumulation(bool saved, bool own);

// Turns torch's switch for a pool, and back when the pool goes. Thread safety: one thread at a time; no device may work
// while the switch turns.
class Fp16AccumulationSwitch {
 public:
  // Restores what was before the last pool, and turns the switch on if the next one wants that. A switch that the
  // program has turned on itself stays on: require_fp16_accumulation() tells it.
  void turn(bool on);
  void restore() { turn(false); }
  // Whether turn(on) would change torch's switch.
  bool turns(bool on) const;

 private:
  bool after(bool on) const;

  std::optional<bool> before_;  // none: no pool has turned it on
};

}  // namespace roundpipe::device
