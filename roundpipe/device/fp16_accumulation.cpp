#include <roundpipe/device/fp16_accumulation.h>

#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include <ATen/Context.h>

#include <roundpipe/core/error.h>

namespace roundpipe::device {

namespace {

bool torchs_switch() { return at::globalContext().allowFP16AccumulationCuBLAS(); }

}  // namespace

bool wants_fp16_accumulation() {
  const char* const value = std::getenv("ROUNDPIPE_FP16_ACCUMULATION");
  if (value == nullptr || std::string_view(value) == "0") return false;
  if (std::string_view(value) == "1") return true;
  throw std::invalid_argument(concat("[ROUNDPIPE_FP16_ACCUMULATION] the variable is '", value,
                                     "', expected 0 or 1 (products of fp16 matrices are added up in fp16)"));
}

void require_fp16_accumulation(bool on) {
  if (torchs_switch() == on) return;
  throw std::invalid_argument(
      concat("[devices] torch.backends.cuda.matmul.allow_fp16_accumulation is ", on ? "False" : "True",
             ", and the pool was made with", on ? "" : "out",
             " fp16_accumulation, expected the switch as the pool turned it; set it back, or make the pool ",
             on ? "without" : "with", " fp16_accumulation (ROUNDPIPE_FP16_ACCUMULATION=", on ? 0 : 1, ")"));
}

std::string changed_fp16_accumulation(bool saved, bool own) {
  if (saved == own) return {};
  return concat("[load_checkpoint] the pool was made with", own ? "" : "out",
                " fp16_accumulation, and that of the checkpoint with", saved ? "" : "out",
                ": on CUDA devices, results of float16 weights are not those of a run that was never interrupted; "
                "ROUNDPIPE_FP16_ACCUMULATION=",
                saved ? 1 : 0, " keeps them");
}

void Fp16AccumulationSwitch::turn(bool on) {
  const bool target = after(on), changes = turns(on);
  before_ = on ? std::optional(after(false)) : std::nullopt;
  if (changes) at::globalContext().setAllowFP16AccumulationCuBLAS(target);
}

bool Fp16AccumulationSwitch::turns(bool on) const { return after(on) != torchs_switch(); }

bool Fp16AccumulationSwitch::after(bool on) const {
  // If the program has turned it off since, off is what it wants.
  return on || (torchs_switch() && before_.value_or(true));
}

}  // namespace roundpipe::device
