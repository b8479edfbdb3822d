#include <roundpipe/runtime/model/loss_scale.h>

#include <algorithm>
#include <stdexcept>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>

#include <roundpipe/core/error.h>

namespace roundpipe::runtime {

namespace {

thread_local LossScale::Scope* running = nullptr;

}  // namespace

LossScale::Scope::Scope(const ModelPtr& model, const Reserved& reserved)
    : model_(model), reserved_(reserved), outer_(running) {
  running = this;
}

LossScale::Scope::~Scope() { running = outer_; }

bool LossScale::Scope::take_scaled() { return running != nullptr && std::exchange(running->scaled_, false); }

LossScale::Reserved LossScale::reserve(const ModelPtr& model) {
  Reserved reserved;
  for (const std::shared_ptr<LossScale>& scale : model->all()) reserved.emplace_back(scale, scale->use(model));
  return reserved;
}

const LossScale::Losses* LossScale::find(const ModelPtr& model) const {
  if (!model) return &outside_;
  const auto found =
      std::ranges::find_if(of_models_, [&](const ModelLosses& losses) { return losses.model.lock() == model; });
  return found == of_models_.end() ? nullptr : &*found;
}

LossScale::Losses& LossScale::of(const ModelPtr& model) { return model ? of_model(model) : outside_; }

LossScale::ModelLosses& LossScale::of_model(const ModelPtr& model) {
  std::erase_if(of_models_, [](const ModelLosses& losses) { return losses.model.expired(); });
  for (ModelLosses& losses : of_models_) {
    if (losses.model.lock() == model) return losses;
  }
  of_models_.emplace_back().model = model;
  return of_models_.back();
}

at::Tensor LossScale::use(const ModelPtr& model) {
  at::Tensor scale;
  {
    const MutexLock lock(mutex_);
    Losses& losses = of(model);
    if (!losses.wait) losses.scale = next_;
    losses.wait = true;
    scale = losses.scale;
    if (!model) ++outside_losses_;
  }
  if (model) model->add(shared_from_this());
  return scale;
}

at::Tensor LossScale::use() {
  if (running == nullptr) return use(nullptr);
  running->scaled_ = true;
  const at::Tensor scale = reserved();
  return scale.defined() ? scale : use(running->model_);
}

at::Tensor LossScale::reserved() const {
  if (running == nullptr) return {};
  for (const auto& [scale, value] : running->reserved_) {
    if (scale.lock().get() == this) return value;
  }
  return {};
}

at::Tensor LossScale::next() const {
  if (const at::Tensor scale = reserved(); scale.defined()) return scale;
  const MutexLock lock(mutex_);
  const Losses* const losses = find(running == nullptr ? nullptr : running->model_);
  return losses != nullptr && losses->wait ? losses->scale : next_;
}

std::vector<const LossScale::Losses*> LossScale::of_next_step(const std::vector<ModelPtr>& models) const {
  std::vector<const Losses*> found;
  for (const ModelPtr& model : models) {
    if (const Losses* const losses = find(model)) found.push_back(losses);
  }
  found.push_back(&outside_);
  return found;
}

at::Tensor LossScale::of_step(const std::vector<ModelPtr>& models, bool several_nodes) {
  at::Tensor scale;
  {
    const MutexLock lock(mutex_);
    const std::vector<const Losses*> all = of_next_step(models);
    for (const Losses* losses : all) {
      if (!losses->wait) continue;
      if (scale.defined() && scale.item<float>() != losses->scale.item<float>()) {
        throw std::invalid_argument(concat(
            "[step] losses of this step were scaled by ", scale.item<float>(), " and by ", losses->scale.item<float>(),
            ", expected one scale, as gradients of both were added; scale them in the loss function of the model's "
            "calls, or give each model a GradScaler of its own"));
      }
      scale = losses->scale;
    }
    if (several_nodes && !scale.defined()) scale = next_;
    for (size_t i = 0; i < all.size() && !scale.defined(); ++i) scale = all[i]->scale;
  }
  belong_to(models);
  return scale;
}

void LossScale::belong_to(const std::vector<ModelPtr>& models) {
  for (const ModelPtr& model : models) model->add(shared_from_this());
}

bool LossScale::has_stepped(const ModelPtr& model) const {
  const MutexLock lock(mutex_);
  return std::ranges::any_of(of_models_,
                             [&](const ModelLosses& losses) { return losses.stepped && losses.model.lock() == model; });
}

void LossScale::stepped(const std::vector<ModelPtr>& models) {
  const MutexLock lock(mutex_);
  for (const ModelPtr& model : models) {
    ModelLosses& losses = of_model(model);
    losses.wait = false;
    losses.stepped = true;
  }
  outside_.wait = false;
}

void LossScale::stepped_outside(uint64_t losses) {
  const MutexLock lock(mutex_);
  if (outside_losses_ == losses) outside_.wait = false;
}

uint64_t LossScale::outside_losses() const {
  const MutexLock lock(mutex_);
  return outside_losses_;
}

void LossScale::forget(const std::vector<ModelPtr>& models) {
  const MutexLock lock(mutex_);
  for (const ModelPtr& model : models) of(model) = {};
  outside_ = {};
}

void LossScale::set_next(at::Tensor scale) {
  const MutexLock lock(mutex_);
  next_ = std::move(scale);
}

void LossScale::set_next_unless_waiting(const std::vector<ModelPtr>& models, at::Tensor scale) {
  const MutexLock lock(mutex_);
  if (std::ranges::none_of(of_next_step(models), [](const Losses* losses) { return losses->wait; }))
    next_ = std::move(scale);
}

void LossScale::set_next_unless_waiting(at::Tensor scale) {
  const MutexLock lock(mutex_);
  if (!outside_.wait && std::ranges::none_of(of_models_, &ModelLosses::wait)) next_ = std::move(scale);
}

void LossScale::restart(at::Tensor scale, bool waits) {
  const MutexLock lock(mutex_);
  of_models_.clear();
  outside_ = {waits ? scale : at::Tensor(), waits};
  next_ = std::move(scale);
}

at::Tensor LossScale::waiting_or_next() const {
  const MutexLock lock(mutex_);
  for (const ModelLosses& losses : of_models_) {
    if (losses.wait) return losses.scale;
  }
  return outside_.wait ? outside_.scale : next_;
}

at::Tensor LossScale::after_step(const at::Tensor& before, const at::Tensor& after, const at::Tensor& used,
                                 double backoff_factor) {
  if (after.item<float>() >= before.item<float>()) return after;
  const at::NoGradGuard no_grad;
  return at::minimum(before, (used.to(at::kDouble) * backoff_factor).to(at::kFloat));
}

std::vector<std::shared_ptr<LossScale>> LossScales::all() const {
  std::vector<std::shared_ptr<LossScale>> living;
  const MutexLock lock(mutex_);
  for (const std::weak_ptr<LossScale>& scale : scales_) {
    if (auto one = scale.lock()) living.push_back(std::move(one));
  }
  return living;
}

bool LossScales::has(const LossScale& scale) const {
  return std::ranges::any_of(all(), [&](const auto& own) { return own.get() == &scale; });
}

void LossScales::add(const std::shared_ptr<LossScale>& scale) {
  const MutexLock lock(mutex_);
  std::erase_if(scales_, [](const std::weak_ptr<LossScale>& each) { return each.expired(); });
  const bool known =
      std::ranges::any_of(scales_, [&](const std::weak_ptr<LossScale>& each) { return each.lock() == scale; });
  if (!known) scales_.push_back(scale);
}

}  // namespace roundpipe::runtime
