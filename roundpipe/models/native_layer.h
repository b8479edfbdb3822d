#pragma once

#include <functional>
#include <memory>
#include <optional>

#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::models {

// What a native layer computes, on one device. Used by one thread.
class NativeCode {
 public:
  virtual ~NativeCode() = default;
  // Takes the configuration of the calls that follow; not null.
  virtual void configure(const std::shared_ptr<const void>& config) = 0;
  // Nothing: this call runs in the general form.
  virtual std::optional<runtime::Values> forward(const runtime::Values& inputs,
                                                 const runtime::LayerContext& context) = 0;
};

struct NativeLayerParts {
  // The same layer in a form that runs any call. It holds the tensors and says what has changed.
  std::unique_ptr<runtime::Layer> general;
  // The configuration for a call that is made now; none: the call runs in the general form. Asked on the caller's
  // thread when a call is made. Returns the same object as before if nothing has changed.
  std::function<std::shared_ptr<const void>()> config;
  // Makes code over the tensors of one of general's shells, which outlives it. Any thread.
  std::function<std::unique_ptr<NativeCode>(const runtime::LayerShell&)> code;
};

// Makes a layer that computes natively where `config` and its code allow it, and otherwise has `general` do it. Both
// use the same tensors. A native forward, and its backward, take no lock.
std::unique_ptr<runtime::Layer> make_native_layer(NativeLayerParts parts);

}  // namespace roundpipe::models
