#include <roundpipe/memory/parameter_block.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <roundpipe/core/error.h>

namespace roundpipe::memory {

using device::EventPtr;

ParameterBlock::ParameterBlock(std::vector<NamedTensor> parameters, bool pinned)
    : parameters_(std::move(parameters)), pinned_(pinned) {
  for (const NamedTensor& parameter : parameters_) {
    if (!parameter.tensor.device().is_cpu()) {
      throw std::invalid_argument(concat("[RoundPipe] parameter '", parameter.name, "' is on ",
                                         parameter.tensor.device().str(),
                                         "; weights live on the host, call model.cpu() first, or "
                                         "to_empty(device='cpu') for a model without values"));
    }
    layout_.add(parameter.tensor, parameter.tensor.scalar_type());
  }
  const at::NoGradGuard no_grad;
  buffers_[0] = allocate_host(layout_.size_bytes, pinned_);
  published_[0] = device::fired_event();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor view = layout_.view(buffers_[0], i);
    view.copy_(parameters_[i].tensor.detach());
    parameters_[i].tensor.set_data(view);
  }
}

ParameterBlock::Reading ParameterBlock::read() const {
  return {buffers_[current_], published_[current_], current_, generation_[current_]};
}

void ParameterBlock::add_reader(const Reading& reading, EventPtr uploaded) {
  std::vector<EventPtr>& readers = readers_[reading.buffer];
  std::erase_if(readers, [](const EventPtr& event) { return event->complete(); });
  readers.push_back(std::move(uploaded));
}

void ParameterBlock::begin_publish(bool in_place) {
  if (!in_place) current_ ^= 1;
  if (!buffers_[current_].defined()) buffers_[current_] = allocate_host(layout_.size_bytes, pinned_);
  ++generation_[current_];
  published_[current_] = device::make_event();
  {
    std::lock_guard lock(mutex_);
    publications_.push_back({current_, std::move(readers_[current_]), published_[current_]});
  }
  readers_[current_].clear();
}

void ParameterBlock::finish_publish(const std::vector<at::Tensor>& values) {
  Publication publication;
  {
    std::lock_guard lock(mutex_);
    publication = std::move(publications_.front());
    publications_.pop_front();
  }
  constexpr double kLong_ms = 1e6;
  for (const EventPtr& reader : publication.readers) {
    while (!reader->wait_for(kLong_ms)) {
    }
  }
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) layout_.view(buffers_[publication.buffer], i).copy_(values[i]);
  publication.published->fire();
}

void ParameterBlock::repoint() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].tensor.set_data(layout_.view(buffers_[current_], i));
  }
}

void ParameterBlock::adopt_replaced() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    const TensorLayout& expected = layout_.tensors[i];
    const bool same_place = tensor.storage().is_alias_of(buffers_[0].storage()) ||
                            (buffers_[1].defined() && tensor.storage().is_alias_of(buffers_[1].storage()));
    if (same_place) continue;
    if (tensor.scalar_type() != expected.dtype || tensor.sizes() != at::IntArrayRef(expected.sizes) ||
        !tensor.device().is_cpu()) {
      throw std::invalid_argument(concat("[RoundPipe] parameter '", parameters_[i].name, "' has become ",
                                         tensor.toString(), tensor.sizes(), " since the model was wrapped (was ",
                                         c10::toString(expected.dtype), at::IntArrayRef(expected.sizes),
                                         " on the CPU); change the model first, then wrap it"));
    }
    const at::Tensor view = layout_.view(buffers_[current_], i);
    view.copy_(tensor.detach());
    parameters_[i].tensor.set_data(view);
    // So that whoever keeps a copy sees the change.
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

int64_t ParameterBlock::host_bytes() const { return layout_.size_bytes * (buffers_[1].defined() ? 2 : 1); }

}  // namespace roundpipe::memory
