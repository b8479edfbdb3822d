#include <roundpipe/training/copy_steps.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <unordered_map>

#include <ATen/core/grad_mode.h>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/engine_life.h>

namespace roundpipe {

using runtime::FunctionThread;

namespace {

constexpr size_t kNone = std::numeric_limits<size_t>::max();

uint32_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

}  // namespace

CopySteps::CopySteps(Pipelines models, std::vector<at::Tensor> host_parameters)
    : models_(std::move(models)), host_parameters_(std::move(host_parameters)) {}

void CopySteps::set_copies(TrainedParameters::Named named, std::vector<at::Tensor> sources,
                           std::vector<at::Tensor> copies) {
  std::unordered_map<const c10::TensorImpl*, size_t> places;
  for (size_t i = 0; i < sources.size(); ++i) places[sources[i].unsafeGetTensorImpl()] = i;
  const auto place = [&](const at::Tensor& tensor) {
    const auto found = places.find(tensor.unsafeGetTensorImpl());
    return found == places.end() ? kNone : found->second;
  };
  is_on_host_.assign(sources.size(), 0);
  host_copies_.clear();
  for (const at::Tensor& parameter : host_parameters_) {
    host_copies_.push_back(place(parameter));
    if (host_copies_.back() != kNone) is_on_host_[host_copies_.back()] = 1;
  }
  for (const auto& model : models_) {
    model->gradients().set_shows_at_once(false);
    std::vector<std::vector<at::Tensor>> blocks;
    for (const runtime::BlockState& block : model->model().blocks) {
      auto& of_block = blocks.emplace_back();
      for (const memory::NamedTensor& parameter : block.block->parameters()) {
        const size_t at = place(parameter.tensor);
        of_block.push_back(at == kNone ? parameter.tensor : copies[at]);
      }
    }
    model->weights().set_optimizer_parameters(std::move(blocks));
  }
  sources_ = std::move(sources);
  copies_ = std::move(copies);
  seen_ = look();
  seen_copies_ = copy_versions();
  trained_ = TrainedParameters(std::move(named));
}

at::Tensor CopySteps::copy_of(const at::Tensor& parameter) const {
  for (size_t i = 0; i < sources_.size(); ++i) {
    if (sources_[i].is_same(parameter)) return copies_[i];
  }
  return {};
}

std::vector<uint32_t> CopySteps::copy_versions() const {
  std::vector<uint32_t> versions;
  for (const at::Tensor& copy : copies_) versions.push_back(version_of(copy));
  return versions;
}

std::vector<CopySteps::Seen> CopySteps::look() const {
  std::vector<Seen> seen;
  for (size_t i = 0; i < sources_.size(); ++i) {
    // The engine itself points parameters in a pipeline elsewhere.
    seen.emplace_back(version_of(sources_[i]), is_on_host_[i] != 0 ? sources_[i].data_ptr() : nullptr);
  }
  return seen;
}

bool CopySteps::has_gradients() const {
  return std::ranges::any_of(models_, [](const auto& model) { return model->gradients().any(); });
}

void CopySteps::adopt_replaced() {
  for (const auto& model : models_) model->weights().adopt_replaced();
}

void CopySteps::drain() {
  for (const auto& model : models_) model->drain();
}

// -- what other code has written ------------------------------------------------------------------------------------

void CopySteps::take_writes() {
  adopt_replaced();
  const std::vector<Seen> looked = look();
  if (looked == seen_) return;
  FunctionThread::instance().wait_all();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < sources_.size(); ++i) {
    if (looked[i] == seen_[i]) continue;
    const bool written = version_of(copies_[i]) != seen_copies_[i];
    copies_[i].copy_(sources_[i]);
    seen_[i] = looked[i];
    if (!written) seen_copies_[i] = version_of(copies_[i]);
  }
}

bool CopySteps::copies_written() const { return has_copies() && !pending_ && copy_versions() != seen_copies_; }

void CopySteps::publish_written_copies() {
  if (!pending_) FunctionThread::instance().wait_all();  // another model's step function may be writing
  if (copies_written()) publish_copies();
}

// -- steps by a function --------------------------------------------------------------------------------------------

void CopySteps::prepare_step(bool asynchronous) {
  require_engine();
  finish_update();
  for (const auto& model : models_) model->planner().set_asynchronous(asynchronous);
  for (const auto& model : models_) model->raise_pending();
  take_writes();
}

CopySteps::Tickets CopySteps::begin_tickets() {
  Tickets tickets;
  for (const auto& model : models_) tickets.push_back(model->begin_step());
  return tickets;
}

void CopySteps::queue_step(std::function<void()> function) {
  // May throw, so it comes first: a version that has begun must be finished.
  const auto tickets = std::make_shared<Tickets>(begin_tickets());
  std::vector<at::Tensor> host_gradients = take_host_gradients();
  const auto weights = std::make_shared<Updates>(begin_updates(/*in_place=*/false));
  pending_ = FunctionThread::instance().queue(
      [self = shared_from_this(), tickets, weights, host = std::move(host_gradients), function = std::move(function)] {
        return self->run_step(*weights, *tickets, host, function);
      });
}

bool CopySteps::run_step(Updates& weights, Tickets& tickets, const std::vector<at::Tensor>& host_gradients,
                         const std::function<void()>& function) {
  for (const auto& update : weights) update->make();
  bool landed = true;
  for (const auto& ticket : tickets) landed &= ticket->hand_over();
  if (!landed) {
    clear_gradients(/*set_to_none=*/true);
    return false;
  }
  add_host_gradients(host_gradients);
  try {
    const double began_ms = now_ms();
    function();
    // Not of the first one, which sets up its state.
    if (std::exchange(has_updated_, true)) {
      int64_t weight_bytes = 0;
      for (const at::Tensor& source : sources_) weight_bytes += static_cast<int64_t>(source.nbytes());
      for (const auto& model : models_) model->model().updates.add(weight_bytes, now_ms() - began_ms);
    }
  } catch (...) {
    // Undoes the step as far as possible: the function may have changed parameters already.
    clear_gradients(/*set_to_none=*/true);
    throw;
  }
  return true;
}

void CopySteps::settle_step() {
  finish_update();
  drain();
  publish_now();
}

std::vector<at::Tensor> CopySteps::take_host_gradients() {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : host_parameters_) {
    gradients.push_back(parameter.grad());
    parameter.mutable_grad().reset();
  }
  return gradients;
}

void CopySteps::add_host_gradients(const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    if (host_copies_[i] == kNone) {
      throw std::invalid_argument(
          "[step] a parameter that is used on the host has a gradient, and was frozen when the optimizer's parameters "
          "were made, expected none; set requires_grad before the first step");
    }
    const at::Tensor& copy = copies_[host_copies_[i]];
    const at::Tensor gradient = gradients[i].to(at::kCPU, copy.scalar_type());
    at::Tensor& present = copy.mutable_grad();
    present = present.defined() ? present + gradient : gradient;
  }
}

void CopySteps::take_result(const FunctionThread::Run& finished) {
  // Also if the function threw, since it may have changed some parameters.
  const bool before = std::exchange(unpublished_, true);
  seen_copies_ = copy_versions();
  unpublished_ = finished.result() || before;
}

void CopySteps::finish_update() {
  require_callers_thread();
  FunctionThread::require_elsewhere();
  if (pending_) {
    pending_->wait();
    const FunctionThread::RunPtr finished = std::exchange(pending_, nullptr);
    take_result(*finished);
  }
  if (reader_) {
    reader_();
    reader_ = nullptr;
  }
}

void CopySteps::finish_all_updates() {
  finish_update();
  FunctionThread::instance().wait_all();
}

// -- publishing -----------------------------------------------------------------------------------------------------

CopySteps::Updates CopySteps::begin_updates(bool in_place) {
  Updates updates;
  if (!unpublished_) return updates;
  unpublished_ = false;
  {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < host_parameters_.size(); ++i) {
      if (host_copies_[i] != kNone) host_parameters_[i].copy_(copies_[host_copies_[i]]);
    }
  }
  seen_ = look();
  for (const auto& model : models_) updates.push_back(model->weights().begin_update(in_place));
  return updates;
}

void CopySteps::publish_copies() {
  for (const auto& model : models_) {
    model->planner().set_asynchronous(false);
    model->drain();
  }
  unpublished_ = true;
  publish_now();
}

void CopySteps::publish_now() {
  if (!unpublished_) return;
  for (const auto& update : begin_updates(/*in_place=*/true)) update->make();
  seen_copies_ = copy_versions();
}

void CopySteps::synchronize() {
  finish_all_updates();
  drain();
  take_writes();
  unpublished_ |= copies_written();
  publish_now();
  for (const auto& model : models_) model->expose();
}

void CopySteps::show_weights() {
  publish_written_copies();
  for (const auto& model : models_) model->weights().show();
}

void CopySteps::accept_loaded(bool unpublished) {
  seen_ = look();
  seen_copies_ = copy_versions();
  unpublished_ = unpublished;
}

// -- steps of an optimizer by itself --------------------------------------------------------------------------------

void CopySteps::hand_over() {
  finish_all_updates();
  const bool host_has = std::ranges::any_of(host_parameters_, [](const auto& each) { return each.grad().defined(); });
  if (!has_gradients() && !host_has) return;
  drain();
  const Tickets tickets = begin_tickets();
  const std::vector<at::Tensor> host_gradients = take_host_gradients();
  for (const auto& ticket : tickets) ticket->hand_over();
  add_host_gradients(host_gradients);
}

void CopySteps::changed_from_outside() {
  finish_all_updates();
  unpublished_ = true;
}

void CopySteps::clear_gradients(bool set_to_none) {
  for (const at::Tensor& copy : copies_) {
    at::Tensor& gradient = copy.mutable_grad();
    if (!gradient.defined()) continue;
    if (set_to_none)
      gradient.reset();
    else
      gradient.detach_().zero_();
  }
}

bool CopySteps::has_landed_gradients() const {
  return std::ranges::any_of(copies_, [](const at::Tensor& copy) { return copy.grad().defined(); });
}

}  // namespace roundpipe
