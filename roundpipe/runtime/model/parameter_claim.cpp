#include <roundpipe/runtime/model/parameter_claim.h>

#include <map>
#include <stdexcept>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/mutex.h>

namespace roundpipe::runtime {

namespace {

// Never destroyed: models may be static objects. A claim holds its tensors, so no address is used again.
struct Claims {
  Mutex mutex;
  std::map<std::pair<ParameterClaim::To, const c10::TensorImpl*>, ParameterClaim*> all ROUNDPIPE_GUARDED_BY(mutex);
};

Claims& claims() {
  static auto* const instance = new Claims;
  return *instance;
}

}  // namespace

void ParameterClaim::require_free(To to, const std::string& model, const Named& parameters,
                                  const ParameterClaim* in_place_of) {
  require_own_process();
  const MutexLock lock(claims().mutex);
  for (const auto& [name, tensor] : parameters) {
    const auto found = claims().all.find({to, tensor.unsafeGetTensorImpl()});
    if (found == claims().all.end() || found->second->released_ || found->second == in_place_of) continue;
    throw std::invalid_argument(concat(
        "[RoundPipe] parameter '", name, "' of ", model, to == To::kValues ? " is in the model " : " is stepped by ",
        found->second->model_, " already, expected parameters that no other model ",
        to == To::kValues ? "has" : "steps", ": each would undo the steps of the other; use that model, or let it go ",
        "before ", to == To::kValues ? "this one is made" : "this one is stepped", " (in Python: del model)"));
  }
}

ParameterClaim::ParameterClaim(To to, std::string model, Named parameters, std::function<void()> on_loss)
    : to_(to), model_(std::move(model)), parameters_(std::move(parameters)), on_loss_(std::move(on_loss)) {
  const MutexLock lock(claims().mutex);
  for (const auto& [name, tensor] : parameters_) {
    ParameterClaim*& owner = claims().all[{to_, tensor.unsafeGetTensorImpl()}];
    if (owner != nullptr && owner != this && !owner->lost_.exchange(true)) owner->on_loss_();
    owner = this;
  }
}

ParameterClaim::~ParameterClaim() {
  if (is_left_behind()) return;
  const MutexLock lock(claims().mutex);
  for (const auto& [name, tensor] : parameters_) {
    const auto found = claims().all.find({to_, tensor.unsafeGetTensorImpl()});
    if (found != claims().all.end() && found->second == this) claims().all.erase(found);
  }
}

void ParameterClaim::release() {
  if (is_left_behind()) return;
  const MutexLock lock(claims().mutex);
  released_ = true;
}

bool ParameterClaim::any_claimed(const std::vector<at::Tensor>& parameters) {
  require_own_process();
  const MutexLock lock(claims().mutex);
  for (const at::Tensor& parameter : parameters) {
    const auto found = claims().all.find({To::kValues, parameter.unsafeGetTensorImpl()});
    if (found != claims().all.end() && !found->second->released_) return true;
  }
  return false;
}

}  // namespace roundpipe::runtime
