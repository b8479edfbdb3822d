#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/memory/named_tensor.h>

namespace roundpipe::runtime {

// A claim to the user's parameters, of one of two kinds. Whoever has it keeps values of their own for the parameters,
// so of two that had the same one, each would undo the steps of the other. Thread safety: any thread.
class ParameterClaim {
 public:
  using Named = std::vector<memory::NamedTensor>;
  enum class To {
    kValues,  // what calls read: of a model
    kSteps,   // what an optimizer steps: of a model, or of one that holds it with others
  };

  // Throws std::invalid_argument if a model has claimed one of these and has not released it, unless it has the claim
  // `in_place_of` (null: none).
  static void require_free(To to, const std::string& model, const Named& parameters,
                           const ParameterClaim* in_place_of = nullptr);
  // `on_loss`: called when another model claims one of them, after release() or in place of this one. REQUIRES:
  // require_free.
  ParameterClaim(To to, std::string model, Named parameters, std::function<void()> on_loss = [] {});
  ~ParameterClaim();
  ParameterClaim(const ParameterClaim&) = delete;
  ParameterClaim& operator=(const ParameterClaim&) = delete;

  // The user has let the model go: others may claim its parameters, even if something still keeps it.
  void release();
  // Whether another model has claimed one of them.
  bool is_lost() const { return lost_.load(); }
  // Whether a model has claimed the values of one of these and has not released it.
  static bool any_claimed(const std::vector<at::Tensor>& parameters);

 private:
  const To to_;
  const std::string model_;
  const Named parameters_;
  const std::function<void()> on_loss_;
  std::atomic<bool> lost_{false};
  bool released_ = false;  // protected by the lock of all claims
};

}  // namespace roundpipe::runtime
